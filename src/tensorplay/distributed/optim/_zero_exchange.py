"""How updated parameters travel from their owners to all ranks."""

from collections.abc import Sequence

import torch

from tensorplay.compression.driver import Lane
from tensorplay.compression.rounds import AllToAll, Exchange, Scratch

__all__ = [
    "PARAMETERS_KEY",
    "PIECE_BYTES",
    "WORKERS",
    "FlatParts",
    "borrow",
    "chunks_by_size",
    "in_turns",
    "parameter_round",
    "share_parameters",
]

PARAMETERS_KEY = "zero"
"""Lane of every exchange of the sharded optimizers of a group."""

WORKERS = 4
"""Exchanges side by side: pieces that few ranks own leave links idle, which others then use."""

PIECE_BYTES = 8 << 20
"""Size of what travels in one exchange: small enough to keep scratch small, large enough to hide latency."""

_ALIGNMENT_BYTES = 16


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _size_bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    extent = 1
    for size, step in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if step != extent:
                return False
            extent *= size
    return True


def chunks_by_size(parameters: Sequence[torch.Tensor], chunk_bytes: int | None = None) -> list[list[int]]:
    """Cut the parameters, in order, into runs of about `chunk_bytes` (`PIECE_BYTES`); returns their indexes."""
    chunk_bytes = chunk_bytes or PIECE_BYTES
    chunks: list[list[int]] = []
    filled = chunk_bytes
    for index, parameter in enumerate(parameters):
        if filled >= chunk_bytes:
            chunks.append([])
            filled = 0
        chunks[-1].append(index)
        filled += _size_bytes(parameter)
    return chunks


def in_turns(owners: Sequence[int]) -> list[int]:
    """Order items so that every run of them has all owners: each owner's first item, each one's second, …

    Example:
        >>> in_turns([0, 0, 0, 1, 1])
        [0, 3, 1, 4, 2]
    """
    seen: dict[int, int] = {}
    turns = []
    for owner in owners:
        turns.append(seen.get(owner, 0))
        seen[owner] = turns[-1] + 1
    return sorted(range(len(owners)), key=lambda item: (turns[item], owners[item]))


def borrow(scratch: Scratch, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Borrow bytes and see them as another dtype: all rounds of these exchanges, of any dtype, use the same memory."""
    size_bytes = numel * dtype.itemsize
    return scratch.borrow(f"zero/{name}", size_bytes, torch.uint8, device).view(dtype)


class _Message:
    """The parameters one rank owns, as one run of bytes.

    A single contiguous parameter is its own message. Others are packed behind each other, each in its own order of
    dimensions, at offsets that any dtype can be read at.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.numel()]
        self.size_bytes = sum(_padded(_size_bytes(parameter)) for parameter in self.parameters)
        self.is_direct = len(self.parameters) == 1 and self.parameters[0].is_contiguous()

    def direct(self) -> torch.Tensor:
        return self.parameters[0].detach().view(-1).view(torch.uint8)

    def places(self, room: torch.Tensor) -> list[torch.Tensor]:
        """Where each parameter is in `room`, in the parameter's shape."""
        found = []
        start = 0
        for parameter in self.parameters:
            flat = room[start : start + _size_bytes(parameter)].view(parameter.dtype)
            if is_dense(parameter):
                found.append(flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset()))
            else:
                found.append(flat.view(parameter.shape))
            start += _padded(_size_bytes(parameter))
        return found


def parameter_round(
    parts: Sequence[Sequence[torch.Tensor]], rank: int, scratch: Scratch, device: torch.device
) -> AllToAll:
    """Return the round that gives every rank the owners' values: `parts[r]` are the parameters that rank r owns.

    Writing a parameter raises its version, so that autograd notices whoever still needs the old value.
    """
    messages = [_Message(part) for part in parts]
    own = messages[rank]
    receives: list[torch.Tensor | None] = []
    for source, message in enumerate(messages):
        if source == rank or not message.parameters:
            receives.append(None)
        elif message.is_direct:
            torch.autograd.graph.increment_version(message.parameters[0])
            receives.append(message.direct())
        else:
            receives.append(borrow(scratch, f"from/{source}", message.size_bytes, torch.uint8, device))
    outgoing: list[torch.Tensor] = []

    @torch.no_grad()
    def produce(peer: int) -> torch.Tensor | None:
        if peer == rank or not own.parameters:
            return None
        if not outgoing:
            if own.is_direct:
                outgoing.append(own.direct())
            else:
                room = borrow(scratch, "own", own.size_bytes, torch.uint8, device)
                for place, parameter in zip(own.places(room), own.parameters, strict=True):
                    place.copy_(parameter)
                outgoing.append(room)
        return outgoing[0]

    @torch.no_grad()
    def consume(source: int) -> None:
        room, message = receives[source], messages[source]
        if room is not None and not message.is_direct:
            for place, parameter in zip(message.places(room), message.parameters, strict=True):
                parameter.copy_(place)

    return AllToAll(produce, receives, consume)


def share_parameters(lane: Lane, parts: Sequence[Sequence[torch.Tensor]], device: torch.device) -> None:
    """Give every rank the owners' parameters and wait for it, in pieces of about `PIECE_BYTES`."""
    flat = [(owner, parameter) for owner, part in enumerate(parts) for parameter in part]
    entries = [flat[place] for place in in_turns([owner for owner, _ in flat])]

    def exchange(chosen: list[tuple[int, torch.Tensor]], scratch: Scratch) -> Exchange:
        split: list[list[torch.Tensor]] = [[] for _ in parts]
        for owner, parameter in chosen:
            split[owner].append(parameter)
        yield parameter_round(split, lane.rank, scratch, device)

    waiting = []
    for chunk in chunks_by_size([parameter for _, parameter in entries]):
        chosen = [entries[index] for index in chunk]
        waiting.append(lane.submit(lambda scratch, chosen=chosen: exchange(chosen, scratch)))  # type: ignore[misc]
    for done in waiting:
        error = done.wait()
        if error is not None:
            raise error


class FlatParts:
    """The parameters of each owner and dtype as views of one buffer, which travels whole.

    Args:
        parts: by owner; every parameter must be dense.

    Raises: ValueError: a parameter has gaps or overlaps in memory.
    """

    def __init__(self, parts: Sequence[Sequence[torch.Tensor]], device: torch.device) -> None:
        self._device = device
        self._messages = [_Message(part) for part in parts]
        self._rooms: list[torch.Tensor] = []
        for message in self._messages:
            for parameter in message.parameters:
                if not is_dense(parameter):
                    raise ValueError(
                        f"parameters_as_bucket_view=True needs parameters without gaps in memory, got shape "
                        f"{tuple(parameter.shape)} with strides {parameter.stride()}; pass False"
                    )
            self._rooms.append(torch.empty(message.size_bytes, dtype=torch.uint8, device=device))
        self.adopt()

    @torch.no_grad()
    def adopt(self) -> None:
        """Make the parameters views of the buffers again where somebody gave them memory of their own."""
        for message, room in zip(self._messages, self._rooms, strict=True):
            for place, parameter in zip(message.places(room), message.parameters, strict=True):
                if parameter.data_ptr() != place.data_ptr():
                    place.copy_(parameter)
                    parameter.data = place

    def share(self, lane: Lane) -> None:
        """Send the own buffer, receive the others' in place, and wait for it."""
        self.adopt()
        for owner, message in enumerate(self._messages):
            if owner != lane.rank:
                for parameter in message.parameters:
                    torch.autograd.graph.increment_version(parameter)

        def exchange(scratch: Scratch) -> Exchange:
            own = self._rooms[lane.rank]
            receives: list[torch.Tensor | None] = [*self._rooms]
            receives[lane.rank] = None
            yield AllToAll(lambda peer: None if peer == lane.rank else own, receives, lambda source: None)

        error = lane.submit(exchange).wait()
        if error is not None:
            raise error
