"""The process every rank is forked from: it imports torch once, so that a new rank costs milliseconds.

It has one thread, never touches a device and makes no group, so that a fork of it is as good as a new process.
It alone knows whether one of its ranks still lives, so signals go through it and never hit a reused process id.

Talks in lines of JSON with the caller:
    caller   -> {"do": "fork"}, with three descriptors: connection, output file, stack file
    template -> {"pid": P}
    caller   -> {"do": "signal", "pid": P, "signal": S, "group": whether to P's whole process group}
    template -> {"exited": P, "status": as waitpid gives it}
When the caller is gone the connection ends, and the template ends its ranks and itself.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["main"]

_PRELOADED = ("numpy", "torch.distributed", "torch.nn.parallel", "torch.optim")
_PRELOADED_WITHOUT_DEVICES = ("torch._dynamo",)  # a second on first use of a group; may look for devices
_FORK_DESCRIPTORS = 3


def main(descriptor: int) -> None:
    """Serve the caller at the other end of the socket `descriptor` until it is gone."""
    import torch

    from tensorplay.testing import worker

    devices = any(getattr(torch.version, name, None) is not None for name in ("cuda", "hip", "xpu"))
    for name in _PRELOADED if devices else _PRELOADED + _PRELOADED_WITHOUT_DEVICES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # ranks share these objects; collecting must not copy their pages
    sys.exit(_Template(socket.socket(fileno=descriptor), worker.serve).run())


class _Template:
    def __init__(self, caller: socket.socket, serve: Callable[[socket.socket, int, int], None]) -> None:
        self._caller = caller
        self._serve = serve
        self._ranks: set[int] = set()
        self._text = b""
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)

    def run(self) -> int:
        signal.set_wakeup_fd(self._wake_writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._tell({"ready": os.getpid()})
        while True:
            readable = select.select([self._caller.fileno(), self._wake_reader], [], [])[0]
            if self._wake_reader in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_reader, 4096)
                self._reap()
            if self._caller.fileno() in readable and not self._hear():
                break
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in self._ranks:
            os.waitpid(pid, 0)
        return 0

    def _hear(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._caller, 65536, _FORK_DESCRIPTORS)
        except ConnectionError:
            return False
        if not data:
            return False
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["do"] == "fork":
                self._fork(descriptors)
            elif order["pid"] in self._ranks:
                send = os.killpg if order["group"] else os.kill
                with contextlib.suppress(ProcessLookupError):
                    send(order["pid"], order["signal"])
        return True

    def _fork(self, descriptors: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self._caller.close()
                os.close(self._wake_reader)
                os.close(self._wake_writer)
                connection, output, stack = descriptors
                self._serve(socket.socket(fileno=connection), output, stack)
                status = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(status)
        # Both sides make the group, so that it exists whoever runs first.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._ranks.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self._tell({"pid": pid})

    def _reap(self) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._ranks.discard(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # what the rank started goes with it
            self._tell({"exited": pid, "status": status})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):
            self._caller.sendall(json.dumps(message).encode() + b"\n")
