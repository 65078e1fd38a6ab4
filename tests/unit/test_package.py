"""PyTorch under the tensorplay name: the same objects, nothing copied, nothing changed in torch."""

import importlib
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed

import tensorplay as tp

SOURCE = Path(tp.__file__).parent
REPOSITORY = SOURCE.parent.parent
# Packages of ours that carry the name of one of torch's.
STAND_INS = {"distributed", "nn", "testing"}


def run_python(code: str, *arguments: str) -> str:
    """Run `code` in a fresh interpreter, warnings being errors, and return what it prints."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("ours", "theirs", "own"),
    [
        ("tensorplay", "torch", STAND_INS),
        ("tensorplay.nn", "torch.nn", {"parallel"}),
        ("tensorplay.nn.parallel", "torch.nn.parallel", {"distributed", "DistributedDataParallel"}),
        ("tensorplay.distributed", "torch.distributed", {"algorithms", "optim", "init_process_group"}),
    ],
)
def test_every_public_name_is_torchs_own_object(ours: str, theirs: str, own: set[str]) -> None:
    package, twin = importlib.import_module(ours), importlib.import_module(theirs)
    names = [name for name in dir(twin) if not name.startswith("_")]
    assert len(names) > 10
    assert [
        name for name in names if name not in own and getattr(package, name) is not getattr(twin, name)
    ] == []
    assert set(names) <= set(dir(package))


def test_testing_holds_torchs_names_beside_run_ranks() -> None:
    for name in ("FileCheck", "assert_close", "make_tensor"):
        assert getattr(tp.testing, name) is getattr(torch.testing, name)
        assert name in tp.testing.__all__
    assert tp.testing.run_ranks.__module__ == "tensorplay.testing.ranks"
    assert {"MAX_WORLD_SIZE", "RankFailure", "run_ranks"} <= set(tp.testing.__all__)
    tp.testing.assert_close(tp.ones(2), tp.ones(2))
    with pytest.raises(AssertionError, match="not close"):
        tp.testing.assert_close(tp.ones(2), tp.zeros(2))
    with pytest.raises(AttributeError, match=r"module 'tensorplay\.testing' has no attribute 'assert_clsoe'"):
        tp.testing.assert_clsoe  # noqa: B018
    assert importlib.import_module("tensorplay.testing.pool").__name__ == "tensorplay.testing.pool"


def test_names_a_star_import_leaves_out_resolve_too() -> None:
    star: dict[str, object] = {}
    exec("from tensorplay import *", star)
    assert star["randn"] is torch.randn
    dropped = [name for name in dir(torch) if not name.startswith("_") and name not in torch.__all__]
    assert {"optim", "strided", "broadcast_shapes", "channels_last"} <= set(dropped)
    assert all(hasattr(tp, name) for name in dropped)


def test_a_name_follows_torch_when_torch_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = object()
    assert tp.randn is torch.randn
    monkeypatch.setattr(torch, "randn", marker)
    assert tp.randn is marker


def test_submodules_import_as_torchs_own() -> None:
    printed = run_python(
        """
        import importlib, sys
        import tensorplay as tp
        import tensorplay.nn.functional as F
        from tensorplay.utils.data import DataLoader
        import tensorplay.optim
        import tensorplay.optim.lr_scheduler
        import tensorplay.optim.swa_utils
        import tensorplay.utils.data.distributed
        import tensorplay.distributed as dist
        import tensorplay.distributed.device_mesh
        import tensorplay.cuda.amp
        import tensorplay.ops, tensorplay.classes, tensorplay.version
        import torch
        assert F is torch.nn.functional
        assert DataLoader is torch.utils.data.DataLoader
        assert tp.optim.lr_scheduler is torch.optim.lr_scheduler
        for name in ("get_rank", "GradBucket", "new_subgroups", "all_reduce", "ReduceOp"):
            assert getattr(dist, name) is getattr(torch.distributed, name), name
        entered = [name for name in sys.modules if name.startswith("tensorplay.")]
        for name in entered:
            module = sys.modules[name]
            if not module.__name__.startswith("tensorplay"):
                assert module is sys.modules["torch" + name.removeprefix("tensorplay")], name
                assert module.__name__ == module.__spec__.name if module.__spec__ else True, name
        # A module loaded twice would be a copy: no file of torch may belong to two modules.
        modules = {id(module): module for module in sys.modules.values()}
        files = [str(getattr(module, "__file__", None)) for module in modules.values()]
        files = [file for file in files if "/torch/" in file and file.endswith(".py")]
        assert len(files) == len(set(files))
        print(len(entered))
        """
    )
    assert int(printed) > 10


def test_a_submodule_does_not_hide_the_function_of_its_name() -> None:
    rendezvous = importlib.import_module("tensorplay.distributed.rendezvous")
    assert rendezvous is sys.modules["torch.distributed.rendezvous"]
    assert tp.distributed.rendezvous is torch.distributed.rendezvous
    assert callable(tp.distributed.rendezvous)


@pytest.mark.parametrize(
    ("holder", "name"),
    [("tensorplay", "foo"), ("tensorplay.nn", "Linera"), ("tensorplay.distributed", "get_rnak")],
)
def test_a_misspelt_name_is_the_usual_error(holder: str, name: str) -> None:
    with pytest.raises(AttributeError, match=rf"^module '{holder}' has no attribute '{name}'") as raised:
        getattr(importlib.import_module(holder), name)
    assert raised.value.name == name
    assert not hasattr(importlib.import_module(holder), name)


@pytest.mark.parametrize(
    "name",
    [
        "tensorplay.foo",
        "tensorplay.nn.Linear",
        "tensorplay.utils.foo",
        # These exist in torch, but what lies below is ours alone.
        "tensorplay.compression.utils",
        "tensorplay.distributed.algorithms._quantization",
        "tensorplay.distributed.algorithms._comm_hooks",
        "tensorplay.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks",
        "tensorplay.distributed.optim.functional_adam",
    ],
)
def test_a_module_that_is_neither_ours_nor_torchs_to_give_does_not_import(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module(name)


@pytest.mark.parametrize("package", ["algorithms", "optim"])
def test_torchs_algorithms_are_not_reachable(package: str) -> None:
    theirs = importlib.import_module(f"torch.distributed.{package}")
    ours = getattr(tp.distributed, package)
    assert ours is not theirs
    assert ours.__name__ == f"tensorplay.distributed.{package}"
    for name in vars(theirs):
        if not name.startswith("_") and hasattr(ours, name) and hasattr(getattr(ours, name), "__module__"):
            assert getattr(ours, name) is not getattr(theirs, name), name


def test_importing_changes_nothing_for_others() -> None:
    run_python(
        """
        import os, random, sys, warnings
        import numpy, torch
        import torch.distributed, torch.nn.parallel

        def seen():
            return {
                "filters": list(warnings.filters),
                "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
                "random": (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
                "torch": {
                    name: {attribute: id(value) for attribute, value in vars(module).items()}
                    for name, module in sys.modules.items() if name.split(".")[0] == "torch" and module is not None
                },
                "environment": dict(os.environ),
                "group": torch.distributed.is_initialized(),
                "dtype": torch.get_default_dtype(),
            }

        finders, before = list(sys.meta_path), seen()
        import tensorplay as tp, tensorplay.nn, tensorplay.distributed
        import tensorplay.utils.data, tensorplay.nn.functional, tensorplay.optim.lr_scheduler
        assert seen() == before
        added = [finder for finder in sys.meta_path if finder not in finders]
        assert len(added) == 1
        for name in ("torch", "torch.nn", "json", "tensorplayground.nn", "tensorplay", "xtensorplay.nn"):
            assert added[0].find_spec(name, None) is None, name
        """
    )


def test_importing_tensorplay_loads_little_beside_torch() -> None:
    printed = run_python(
        """
        import sys
        import torch
        before = set(sys.modules)
        import tensorplay
        print(*sorted(set(sys.modules) - before))
        """
    )
    assert printed.split() == ["tensorplay", "tensorplay._alias"]


def test_torchs_programs_run_under_this_name() -> None:
    command = [sys.executable, "-m", "tensorplay.distributed.run", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--nproc-per-node" in done.stdout


@pytest.mark.parametrize("backend", ["nccl", "NCCL", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize(
    ("built", "device", "lacking"),
    [(False, False, "built without NCCL"), (True, False, "finds no CUDA device")],
)
def test_nccl_where_there_is_none_says_what_to_use(
    monkeypatch: pytest.MonkeyPatch, backend: str, built: bool, device: bool, lacking: str
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    for call in (
        lambda: tp.distributed.init_process_group(backend),
        lambda: tp.distributed.init_process_group(backend=backend, rank=0, world_size=1),
    ):
        with pytest.raises(ValueError, match=rf"{backend}.*{lacking}.*use \"gloo\""):
            call()
    assert not torch.distributed.is_initialized()


def test_arguments_reach_torchs_init_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorplay.distributed import _start

    calls: list[object] = []
    wrapped = _start._refuse_unusable_nccl(lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    wrapped("nccl", rank=1)
    wrapped()
    wrapped(backend=None, world_size=3)
    assert calls == [(("nccl",), {"rank": 1}), ((), {}), ((), {"backend": None, "world_size": 3})]


def test_compiled_functions_see_through_the_names() -> None:
    @tp.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return tp.nn.functional.relu(tp.sin(x)) + tp.ones(3, dtype=tp.float32)

    x = torch.tensor([-1.0, 0.0, 1.0])
    assert torch.equal(compiled(x), x.sin().relu() + 1)


def test_stubs_name_the_torch_module_they_stand_for() -> None:
    stubs = {path.relative_to(SOURCE) for path in SOURCE.rglob("*.pyi") if path.name != "_torch.pyi"}
    assert len(stubs) > 15
    for stub in stubs:
        module = ".".join(stub.with_suffix("").parts).removesuffix(".__init__")
        assert (SOURCE / stub).read_text() == f"from torch.{module} import *\n"
        assert (SOURCE / stub).with_suffix(".py").exists() is False, f"{stub} would hide a module of ours"
        if module != "utils.tensorboard":  # needs an optional package
            assert importlib.import_module(f"tensorplay.{module}") is importlib.import_module(
                f"torch.{module}"
            )


def test_a_type_checker_resolves_torchs_classes(tmp_path: Path) -> None:
    expected = {
        "tp.nn.Linear(2, 2)": "torch.nn.modules.linear.Linear",
        "tp.randn(2)": "torch._tensor.Tensor",
        "tp.float32": "torch._C.dtype",
        "tp.channels_last": "torch._C.memory_format",
        "tp.optim.SGD": "-> torch.optim.sgd.SGD",
        "F.relu": "def (input: torch._tensor.Tensor, inplace: bool",
        "tp.nn.functional.relu": "def (input: torch._tensor.Tensor, inplace: bool",
        "DataLoader": "torch.utils.data.dataloader.DataLoader",
        "lr_scheduler.StepLR": "-> torch.optim.lr_scheduler.StepLR",
        "dist.get_rank()": "int",
        "dist.GradBucket": "torch._C._distributed_c10d.GradBucket",
        "dist.init_process_group": "backend: str | None",
        "tp.distributed.get_rank()": "int",
        "tp.nn.parallel.DistributedDataParallel": "tensorplay.nn.parallel.distributed.DistributedDataParallel",
        "tp.testing.assert_close": "def (actual: Any, expected: Any",
        "tp.testing.MAX_WORLD_SIZE": "int",
    }
    wrong = ["tp.foo", "tp.nn.Linera", "dist.get_rnak", 'tp.nn.Linear("2", 2)']
    # a name of its own: what mypy has cached under an earlier one tells of an earlier run's folder
    snippet = tmp_path / f"snippet_{uuid.uuid4().hex}.py"
    lines = [
        "import tensorplay as tp",
        "import tensorplay.distributed as dist",
        "import tensorplay.nn.functional as F",
        "from tensorplay.optim import lr_scheduler",
        "from tensorplay.utils.data import DataLoader",
        *(f"reveal_type({expression})" for expression in expected),
        *wrong,
    ]
    snippet.write_text("\n".join(lines) + "\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
        str(snippet),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=170)
    # A reveal may come with the error that explains it: keep what mypy says of each line.
    said: dict[int, str] = {}
    for line in done.stdout.splitlines():
        path, number, text = line.split(":", 2)
        assert path == str(snippet), line
        said[int(number)] = said.get(int(number), "") + text
    for number, (expression, revealed) in enumerate(expected.items(), start=6):
        assert revealed in said[number], (expression, said[number])
        assert "error" not in said[number], (expression, said[number])
    assert sorted(said) == list(range(6, 6 + len(expected) + len(wrong))), done.stdout
    for number in range(6 + len(expected), 6 + len(expected) + len(wrong)):
        assert "error" in said[number]


def test_the_package_says_it_is_typed_and_which_version_it_is() -> None:
    assert (SOURCE / "py.typed").is_file()
    assert tp.__version__.count(".") == 2
    assert tp.__version__ != torch.__version__
