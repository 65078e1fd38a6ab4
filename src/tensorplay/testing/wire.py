"""What the caller and its ranks say to each other: dataclasses, pickled, each behind its length in bytes."""

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Call",
    "Failed",
    "Finished",
    "Idle",
    "MessageReader",
    "Release",
    "receive_message",
    "send_message",
]

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Call:
    """One function call for one rank, with everything of the caller that the rank has to see."""

    name: str
    function: bytes
    rank: int
    world_size: int
    backend: str
    store_port: int
    group_timeout_seconds: float
    seed: int
    warnings_as_errors: bool
    arguments: list[str]
    environment: dict[str, str]
    working_directory: str
    search_path: list[str]
    modules: dict[str, tuple[str | None, list[str] | None]]
    main_file: str | None


@dataclass(frozen=True)
class Finished:
    """The function returned; `payload` is its pickled result."""

    payload: bytes


@dataclass(frozen=True)
class Failed:
    """The function raised. `variables`: those of its innermost frame; `exception`: pickled, None where it cannot be."""

    at_seconds: float
    summary: str
    traceback: str
    variables: str
    exception: bytes | None


@dataclass(frozen=True)
class Release:
    """Every rank is done: the group may be destroyed."""


@dataclass(frozen=True)
class Idle:
    """The rank has cleaned up. `leftover` says what it could not clean; such a rank is not used again."""

    leftover: str | None


def send_message(connection: socket.socket, message: Any) -> None:
    """Send one message; blocks until it is written.

    Example:
        >>> import socket
        >>> left, right = socket.socketpair()
        >>> send_message(left, Release())
        >>> receive_message(right)
        Release()
        >>> left.close(); right.close()
    """
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    connection.sendall(_LENGTH.pack(len(payload)))
    connection.sendall(payload)


def receive_message(connection: socket.socket) -> Any:
    """Wait for one message. Raises EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
    return pickle.loads(_read_exactly(connection, length))


def _read_exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    done = 0
    while done < length:
        count = connection.recv_into(view[done:])
        if count == 0:
            raise EOFError("the other side closed the connection")
        done += count
    return data


class MessageReader:
    """Collect messages from a connection without ever waiting for the rest of one.

    Example:
        >>> import socket
        >>> left, right = socket.socketpair()
        >>> reader = MessageReader(right)
        >>> send_message(left, Idle(None))
        >>> reader.read()
        [Idle(leftover=None)]
        >>> reader.read(), reader.closed
        ([], False)
        >>> left.close(); reader.read(), reader.closed
        ([], True)
        >>> right.close()
    """

    def __init__(self, connection: socket.socket) -> None:
        self.closed = False
        self._connection = connection
        self._data = bytearray()

    def read(self) -> list[Any]:
        """Take what has arrived and return the messages that are complete."""
        while not self.closed:
            try:
                chunk = self._connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionError:
                chunk = b""
            if not chunk:
                self.closed = True
            self._data += chunk
        messages = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            end = _LENGTH.size + length
            if len(self._data) < end:
                break
            messages.append(pickle.loads(memoryview(self._data)[_LENGTH.size : end]))
            self._data = self._data[end:]
        return messages
