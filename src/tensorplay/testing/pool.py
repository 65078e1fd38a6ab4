"""The ranks kept between calls: one template process, forks of it, and the store their groups meet on."""

import atexit
import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

import torch.distributed as dist

from tensorplay.testing.wire import Idle, MessageReader, send_message

__all__ = ["Pool", "Rank", "fixed_environment"]

_START_SECONDS = 180.0
_END_SECONDS = 10.0
_LEAVE_SECONDS = 2.0
_POLL_SECONDS = 0.2


class Rank:
    """The caller's end of one rank process."""

    def __init__(self, pid: int, connection: socket.socket, output: IO[bytes], stack: IO[bytes]) -> None:
        self.pid = pid
        self.connection = connection
        self.reader = MessageReader(connection)
        self.wait_status: int | None = None
        self._output = output
        self._stack = stack

    @property
    def alive(self) -> bool:
        """Whether it has not been reported as ended."""
        return self.wait_status is None

    def send(self, message: Any) -> None:
        """Send a message; a rank that has just ended is noticed elsewhere."""
        with contextlib.suppress(ConnectionError):
            send_message(self.connection, message)

    def clear(self) -> None:
        """Empty what it printed and its stack, before a call."""
        for file in (self._output, self._stack):
            os.ftruncate(file.fileno(), 0)

    def output(self) -> str:
        """What it has printed in this call, stdout and stderr in order."""
        return _content(self._output)

    def stack(self) -> str:
        """The stacks it has written when asked, or nothing."""
        return _content(self._stack)

    def close(self) -> None:
        """Close the caller's files."""
        self.connection.close()
        self._output.close()
        self._stack.close()


def _content(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="backslashreplace")


class Pool:
    """Start, keep and end rank processes. Made by the first call; `close` ends every process it started."""

    def __init__(self) -> None:
        self._closed = False
        self.ranks: list[Rank] = []
        self._calls = 0
        self._text = b""
        self._wait_statuses: dict[int, int] = {}
        self._store, self.store_port = _loopback_store()
        self.control, theirs = socket.socketpair()
        with theirs:
            self._template = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **fixed_environment()},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        atexit.register(self.close)
        try:
            self._expect("ready", _START_SECONDS)
        except BaseException:
            self.close(at_once=True)
            raise

    @property
    def alive(self) -> bool:
        """Whether it can start ranks."""
        return not self._closed and self._template.poll() is None

    def next_call(self) -> int:
        """A number no call before has had: names its keys in the store."""
        self._calls += 1
        return self._calls

    def take(self, world_size: int) -> list[Rank]:
        """The first `world_size` ranks; what is missing is forked."""
        self._read_template()
        self._forget_ended()
        while len(self.ranks) < world_size:
            self.ranks.append(self._fork())
        ranks = self.ranks[:world_size]
        for rank in ranks:
            rank.clear()
        return ranks

    def signal(self, rank: Rank, number: int, group: bool = False) -> None:
        """Send a signal, if the rank still lives, to it or to all it has started as well."""
        order = {"do": "signal", "pid": rank.pid, "signal": int(number), "group": group}
        with contextlib.suppress(OSError):
            self.control.sendall(json.dumps(order).encode() + b"\n")

    def end(self, ranks: Sequence[Rank]) -> None:
        """Let ranks that wait for a message end by themselves; end those that do not."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _LEAVE_SECONDS
        while any(rank.alive for rank in ranks) and time.monotonic() < deadline:
            self.wait(_POLL_SECONDS)
        self.kill(ranks)

    def kill(self, ranks: Sequence[Rank]) -> None:
        """End ranks now, with all they have started, and wait until they are gone."""
        for rank in ranks:
            if rank.alive:
                self.signal(rank, signal.SIGKILL, group=True)
        deadline = time.monotonic() + _END_SECONDS
        while any(rank.alive for rank in ranks) and time.monotonic() < deadline:
            self.wait(_POLL_SECONDS)

    def wait_idle(self, ranks: list[Rank], seconds: float) -> None:
        """Wait until each has cleaned up; end those that don't in time, or could not clean up."""
        deadline = time.monotonic() + seconds
        unfit = []
        waiting = [rank for rank in ranks if rank.alive]
        while waiting and time.monotonic() < deadline:
            self.wait(min(_POLL_SECONDS, deadline - time.monotonic()), waiting)
            for rank in list(waiting):
                answers = [message for message in rank.reader.read() if isinstance(message, Idle)]
                if answers or not rank.alive:
                    waiting.remove(rank)
                if answers and answers[0].leftover is not None:
                    unfit.append(rank)
        self.kill(waiting)
        self.end(unfit)

    def wait(self, seconds: float, ranks: Sequence[Rank] = ()) -> None:
        """Wait until one of `ranks` writes or any rank ends, at most `seconds`; note those that have ended."""
        watched = [self.control, *(rank.connection for rank in ranks if not rank.reader.closed)]
        if self.control in _readable(watched, seconds):
            self._read_template()

    def close(self, at_once: bool = False) -> None:
        """End every process, `at_once` without waiting for those that are idle to end by themselves."""
        atexit.unregister(self.close)
        if self._closed:
            return
        try:
            if not at_once and self._template.poll() is None:
                with contextlib.suppress(RuntimeError):
                    self.end(self.ranks)
        finally:
            self.let_go()
            self._store = None
        try:
            self._template.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._template.kill()
            self._template.wait()

    def let_go(self) -> None:
        """Close the connections; the template and its ranks end when nobody holds them any more."""
        self._closed = True
        self.control.close()
        for rank in self.ranks:
            rank.close()
        self.ranks.clear()

    def forget_in_child(self) -> None:
        """For a fork of the caller: hold nothing, and never destroy the store, whose thread only the caller has."""
        self.let_go()
        atexit.unregister(self.close)
        if self._store is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))

    def _fork(self) -> Rank:
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - kept as long as the rank
        stack = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        with theirs:
            for file in (output, stack):
                _append_only(file.fileno())
            descriptors = [theirs.fileno(), output.fileno(), stack.fileno()]
            socket.send_fds(self.control, [b'{"do": "fork"}\n'], descriptors)
        return Rank(self._expect("pid", _START_SECONDS)["pid"], ours, output, stack)

    def _expect(self, key: str, seconds: float) -> dict[str, int]:
        deadline = time.monotonic() + seconds
        while True:
            if (left := deadline - time.monotonic()) <= 0:
                self.close(at_once=True)
                raise RuntimeError(
                    f"the process that ranks are forked from did not answer within {seconds:g} s"
                )
            if _readable([self.control], left):
                for message in self._read_template():
                    if key in message:
                        return message

    def _read_template(self) -> list[dict[str, int]]:
        others = []
        while _readable([self.control], 0.0):
            data = self.control.recv(65536)
            if not data:
                self.close(at_once=True)
                raise RuntimeError(
                    f"the process that ranks are forked from ended with status {self._template.returncode}; "
                    "its error output is above; the next call starts another one"
                )
            *lines, self._text = (self._text + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "exited" in message:
                    self._wait_statuses[message["exited"]] = message["status"]
                else:
                    others.append(message)
        for rank in self.ranks:
            rank.wait_status = self._wait_statuses.pop(rank.pid, rank.wait_status)
        return others

    def _forget_ended(self) -> None:
        for rank in [rank for rank in self.ranks if not rank.alive]:
            self.ranks.remove(rank)
            rank.close()


def _readable(connections: list[socket.socket], seconds: float) -> list[object]:
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(max(0.0, seconds))]


_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tensorplay.testing.template import main; main(int(sys.argv[2]))"
)


def fixed_environment() -> dict[str, str]:
    """What every rank has in its environment whatever the caller has: loopback only, one thread.

    Example:
        >>> fixed_environment()["OMP_NUM_THREADS"]
        '1'
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, **dict.fromkeys(names, "1")}


def _loopback_store() -> tuple[Any, int]:
    """A store that listens on loopback alone: torch would otherwise listen on every interface."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _append_only(descriptor: int) -> None:
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
