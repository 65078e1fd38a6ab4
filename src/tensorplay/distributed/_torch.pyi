# What a type checker sees of `tensorplay.distributed`: torch's names. Python never reads this file.
# torch.distributed imports some of its names without re-exporting them in a checker's eyes: they follow the star.
from torch._C._distributed_c10d import (
    BuiltinCommHookType as BuiltinCommHookType,
    DebugLevel as DebugLevel,
    FileStore as FileStore,
    GradBucket as GradBucket,
    HashStore as HashStore,
    Logger as Logger,
    PrefixStore as PrefixStore,
    Reducer as Reducer,
    Store as Store,
    TCPStore as TCPStore,
    get_debug_level as get_debug_level,
    set_debug_level as set_debug_level,
    set_debug_level_from_env as set_debug_level_from_env,
)
from torch.distributed import *
from torch.distributed import (
    autograd as autograd,
    distributed_c10d as distributed_c10d,
    rpc as rpc,
    utils as utils,
)
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh, init_device_mesh as init_device_mesh
from torch.distributed.rendezvous import (
    register_rendezvous_handler as register_rendezvous_handler,
    rendezvous as rendezvous,
)
