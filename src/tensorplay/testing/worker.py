"""What runs in a rank: wait for a call, make the group, run the function, answer, clean up, wait again."""

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.testing.modules import CallerModules
from tensorplay.testing.wire import Call, Failed, Finished, Idle, receive_message, send_message

__all__ = ["IN_RANK", "serve"]

IN_RANK = False
"""True in a rank: a call from there is refused, or a script without a `__main__` guard would start ranks for ever."""

_IDLE_MEMORY_BYTES = 1 << 29
_THREAD_END_SECONDS = 0.3
_SHOWN_LOCALS = 20
_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


def serve(connection: socket.socket, output: int, stack: int) -> None:
    """Answer calls until the caller is gone.

    Steps:
      1. a process group of its own; it dies with the template;
      2. output into `output`, SIGUSR1 writes every thread's stack into `stack`;
      3. for each call: run it, answer, wait for the release, clean up, report idle.
    """
    global IN_RANK
    IN_RANK = True
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    _die_with_parent()
    os.dup2(output, 1)
    os.dup2(output, 2)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)
    modules = CallerModules()
    modules.install()
    state = _ProcessState()
    while True:
        try:
            call = receive_message(connection)
        except (EOFError, ConnectionError):
            return
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True, chain=False)
        try:
            answer: Finished | Failed = Finished(_run(call, modules))
        except SystemExit as leaving:
            _leave(leaving.code)
        except BaseException as error:
            answer = _describe(error)
        for stream in {sys.stdout, sys.stderr, *state.streams} - {None}:
            with contextlib.suppress(Exception):  # the function's own streams may be closed
                stream.flush()
        send_message(connection, answer)
        del call, answer
        try:
            receive_message(connection)
        except (EOFError, ConnectionError):
            return
        send_message(connection, Idle(_clean_up(state)))


def _run(call: Call, modules: CallerModules) -> bytes:
    """Steps: 1. the caller's surroundings; 2. the function; 3. the group; 4. run; 5. pickle the result."""
    os.environ.clear()
    os.environ.update(call.environment)
    for name, value in (("RANK", call.rank), ("WORLD_SIZE", call.world_size)):
        os.environ[name] = os.environ["LOCAL_" + name] = str(value)
    os.chdir(call.working_directory)
    sys.argv[:] = call.arguments
    modules.update(call.search_path, call.modules)
    torch.manual_seed(call.seed)
    random.seed(call.seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(call.seed % 2**32)
    _filter_warnings(call.warnings_as_errors)
    if call.main_file is not None:
        modules.load_main(call.main_file)
    function: Callable[[int, int], Any] = pickle.loads(call.function)
    server = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", call.store_port, is_master=False, wait_for_workers=False
    )
    store = dist.PrefixStore(call.name, server)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=call.group_timeout_seconds)
    dist.init_process_group(
        call.backend,
        store=store,
        rank=call.rank,
        world_size=call.world_size,
        timeout=timeout,
    )
    # Gloo may be ready here and still connecting elsewhere: a rank that dies at once must not disturb that.
    store.set(f"ready {call.rank}", "")
    store.wait([f"ready {rank}" for rank in range(call.world_size)], timeout)
    result = function(call.rank, call.world_size)
    try:
        return pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"a rank's result must be picklable, got {type(result).__name__}; "
            "return tensors, numbers or plain containers of them"
        ) from error


def _filter_warnings(as_errors: bool) -> None:
    warnings.resetwarnings()
    warnings.simplefilter("error" if as_errors else "default")
    # torch's own modules use what torch has deprecated; nobody but torch can mend that.
    for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"torch(\.|$)")


def _leave(code: object) -> None:
    """End as the interpreter would on SystemExit: None is 0, a text is printed and is 1."""
    if code is not None and not isinstance(code, int):
        os.write(2, f"{code}\n".encode())
        code = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def _describe(error: BaseException) -> Failed:
    """The exception as text: its traceback below this module, and the variables where it was raised."""
    at_seconds = time.monotonic()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    trace = trace or error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, trace))
    variables = _local_variables(trace)
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    pickled: bytes | None
    try:
        pickled = pickle.dumps(error.with_traceback(None))
        pickle.loads(pickled)
    except Exception:
        pickled = None
    return Failed(at_seconds, summary, text, variables, pickled)


def _local_variables(trace: types.TracebackType | None) -> str:
    """The variables of the innermost frame that is not torch's."""
    frame = None
    while trace is not None:
        if f"{os.sep}torch{os.sep}" not in trace.tb_frame.f_code.co_filename:
            frame = trace.tb_frame
        trace = trace.tb_next
    if frame is None or frame.f_code.co_name == "<module>":
        return ""
    lines = []
    for name, value in list(frame.f_locals.items())[:_SHOWN_LOCALS]:
        try:
            shown = " ".join(repr(value).split())
        except Exception as error:
            shown = f"<repr raised {type(error).__name__}>"
        lines.append(f"    {name} = {shown if len(shown) <= 160 else shown[:157] + '...'}\n")
    return f"Variables in {frame.f_code.co_name}:\n" + "".join(lines) if lines else ""


def _clean_up(state: "_ProcessState") -> str | None:
    """Undo what a call can leave behind; return what it left that can't be undone, or None.

    Steps: 1. destroy the groups; 2. settings as before the first call; 3. collect; 4. look for what is left.
    """
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        return f"destroying its group raised {error!r}"
    state.restore()
    gc.collect()
    if threads := _threads():
        return "threads " + ", ".join(threads)
    if children := _children():
        return f"child processes {children}"
    if (memory := _resident_bytes()) > _IDLE_MEMORY_BYTES:
        return f"{memory} bytes of memory"
    return None


def _threads() -> list[str]:
    """Names of the threads a call has started and not ended; those that notice the end of the group get a moment."""
    deadline = time.monotonic() + _THREAD_END_SECONDS
    left = []
    for thread in threading.enumerate():
        # A dummy stands for a thread of torch's own that has run some Python, such as autograd's.
        if thread is threading.main_thread() or isinstance(thread, threading._DummyThread):
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            left.append(thread.name)
    return sorted(left)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _resident_bytes() -> int:
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, AttributeError):
        return 0


def _die_with_parent() -> None:
    """Linux: the kernel ends this process when the template ends. Elsewhere the closed connection does."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


class _ProcessState:
    """What a call may change in the process, as it was before the first call."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.default_dtype = torch.get_default_dtype()
        self.matmul_precision = torch.get_float32_matmul_precision()
        self.threads = torch.get_num_threads()
        self.streams = sys.stdout, sys.stderr
        self.signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir("/")
        torch.set_default_dtype(self.default_dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.autograd.set_detect_anomaly(False)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(self.threads)
        sys.stdout, sys.stderr = self.streams
        for number, handler in self.signals.items():
            signal.signal(number, handler)
        warnings.resetwarnings()
        signal.alarm(0)
        gc.enable()
