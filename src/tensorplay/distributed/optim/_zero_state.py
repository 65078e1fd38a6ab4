"""Optimizer state on the wire: moved to a parameter's new owner, or collected on one rank."""

import io
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch

from tensorplay.compression.driver import Lane
from tensorplay.compression.rounds import AllToAll, Exchange, Round, Scratch
from tensorplay.distributed.optim._zero_exchange import chunks_by_size
from tensorplay.distributed.optim._zero_shards import Shards

__all__ = ["collect_states", "map_tensors", "move_states"]

States = dict[int, Any]  # parameter number -> its optimizer state


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace every tensor within dicts, lists and tuples by `change(tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(entry, change) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(entry, change) for entry in value)
    return value


def compact_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU in memory of its own size, since a view is saved with all it is a view of."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _encode(states: States) -> torch.Tensor:
    """The states as bytes, with the kind of device that each tensor was on."""
    kinds: list[str] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kinds.append(tensor.device.type)
        return compact_on_cpu(tensor)

    file = io.BytesIO()
    torch.save((map_tensors(states, note), kinds), file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def _decode(data: torch.Tensor, device_of: Callable[[int], torch.device] | None = None) -> States:
    """Read the states; tensors go back to the kind of device they came from, or stay on the CPU."""
    # They come from a rank of the same job, and an optimizer may keep any object.
    states, kinds = torch.load(
        io.BytesIO(data.cpu().numpy().tobytes()), map_location="cpu", weights_only=False
    )
    if device_of is None:
        return dict(states)
    remaining = iter(kinds)

    def place(number: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if next(remaining) == "cpu" else tensor.to(device_of(number))

    return {
        number: map_tensors(state, lambda tensor, number=number: place(number, tensor))  # type: ignore[misc]
        for number, state in states.items()
    }


def _exchange_bytes(
    outgoing: Mapping[int, torch.Tensor], sources: set[int], world_size: int, device: torch.device
) -> Generator[Round, None, dict[int, torch.Tensor]]:
    """Send bytes by destination, return those received by source. Two rounds: how many, then the bytes themselves."""
    sizes = {source: torch.zeros(8, dtype=torch.uint8, device=device) for source in sources}
    announced = {
        peer: torch.tensor([data.numel()], dtype=torch.int64).view(torch.uint8).to(device)
        for peer, data in outgoing.items()
    }
    yield AllToAll(announced.get, [sizes.get(rank) for rank in range(world_size)], lambda source: None)
    received = {
        source: torch.empty(int(size.cpu().view(torch.int64).item()), dtype=torch.uint8, device=device)
        for source, size in sizes.items()
    }
    leaving = {peer: data.to(device) for peer, data in outgoing.items()}
    yield AllToAll(leaving.get, [received.get(rank) for rank in range(world_size)], lambda source: None)
    return received


def move_states(
    shards: Shards, new_owners: Mapping[int, int], device: torch.device
) -> Generator[Round, None, None]:
    """Give parameters to new owners together with their state.

    1. Each old owner takes the states out of its optimizer and sends them to the new owner (two rounds).
    2. The new owner puts them into its own.

    Args:
        new_owners: parameter number -> rank; equal on all ranks. Those that stay are left out of the exchange.
    """
    leaving: dict[int, States] = {}
    sources: set[int] = set()
    for number, new_owner in new_owners.items():
        old_owner = shards.owners[number]
        if old_owner == new_owner:
            continue
        if old_owner == shards.rank:
            states = leaving.setdefault(new_owner, {})
            state = shards.optimizer.state.pop(shards.parameters[number], None)
            if state is not None:
                states[number] = state
        if new_owner == shards.rank:
            sources.add(old_owner)
    outgoing = {peer: _encode(states) for peer, states in leaving.items()}
    received = yield from _exchange_bytes(outgoing, sources, shards.world_size, device)
    shards.give(new_owners)
    for data in received.values():
        for number, state in _decode(data, lambda n: shards.parameters[n].device).items():
            shards.optimizer.state[shards.parameters[number]] = state


def collect_states(shards: Shards, to: int, lane: Lane) -> States:
    """Bring every rank's states to rank `to`, on the CPU, owner by owner in pieces; returns {} on the other ranks.

    All ranks must call it. A sender holds one piece more than its state, the receiver all states and one piece.
    """
    collected: States = {}
    for owner in range(shards.world_size):
        owned = [n for n, its_owner in enumerate(shards.owners) if its_owner == owner]
        for chunk in chunks_by_size([shards.parameters[n] for n in owned]):
            numbers = [owned[index] for index in chunk]
            if owner == to:
                collected.update(_copies(shards, numbers))
                continue
            error = lane.submit(_collection(shards, numbers, owner, to, collected)).wait()
            if error is not None:
                raise error
    return collected if shards.rank == to else {}


def _collection(
    shards: Shards, numbers: list[int], owner: int, to: int, collected: States
) -> Callable[[Scratch], Exchange]:
    def exchange(scratch: Scratch) -> Exchange:
        outgoing = {to: _encode(_copies(shards, numbers))} if shards.rank == owner else {}
        sources = {owner} if shards.rank == to else set()
        received = yield from _exchange_bytes(outgoing, sources, shards.world_size, torch.device("cpu"))
        for data in received.values():
            collected.update(_decode(data))

    return exchange


def _copies(shards: Shards, numbers: list[int]) -> States:
    if not numbers or shards.owners[numbers[0]] != shards.rank:
        return {}
    state = shards.optimizer.state
    return {
        n: map_tensors(state[shards.parameters[n]], compact_on_cpu)
        for n in numbers
        if shards.parameters[n] in state
    }
