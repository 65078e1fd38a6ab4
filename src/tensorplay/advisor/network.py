"""Latency and bandwidth of a group, and of single pairs within and between hosts."""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tensorplay.advisor.advice import Link
from tensorplay.compression.collective import all_reduce_sum
from tensorplay.distributed.algorithms.ddp_comm_hooks._probe import agree

__all__ = ["measure_links"]

_LATENCY_REPEATS = 10
_SMALL_BYTES, _LARGE_BYTES = 1 << 20, 8 << 20
_ENOUGH_SECONDS = 0.25


def measure_links(
    group: dist.ProcessGroup, machines: Sequence[str], device: torch.device
) -> tuple[Link, ...]:
    """Measure the group's all-reduce, and one pair of each kind there is. Collective; about a second.

    Args:
        machines: on which each rank of the group runs.

    1. All-reduce: one value ten times, then 1 MB, then 8 MB where 1 MB took less than a quarter of a second.
    2. Pairs of rank 0 and the first rank on its machine, and the first on another: half a round trip of one value; 1 or
       8 MB one way, answered by one value.
    """
    if group.size() < 2:
        return ()
    links = [_group_link(group, device)]
    kinds = (
        ("within a host", [r for r, machine in enumerate(machines) if r and machine == machines[0]]),
        ("between hosts", [r for r, machine in enumerate(machines) if machine != machines[0]]),
    )
    factor = 2 * (group.size() - 1) / group.size()
    large = (
        _LARGE_BYTES if _SMALL_BYTES * factor / links[0].bytes_per_second < _ENOUGH_SECONDS else _SMALL_BYTES
    )
    for kind, peers in kinds:
        if peers:
            links.append(_pair_link(group, kind, peers[0], large, device))
    return tuple(links)


def _all_reduce_seconds(group: dist.ProcessGroup, nbytes: int, repeats: int, device: torch.device) -> float:
    tensor = torch.zeros(max(1, nbytes // 4), device=device)
    walls = []
    all_reduce_sum(tensor, group).wait()
    for _ in range(repeats):
        agree([0.0], group, device)
        began = time.perf_counter()
        all_reduce_sum(tensor, group).wait()
        _settle(device)
        walls.append(time.perf_counter() - began)
    return statistics.median(agree(walls, group, device))


def _group_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    latency = _all_reduce_seconds(group, 4, _LATENCY_REPEATS, device)
    nbytes = _SMALL_BYTES
    seconds = _all_reduce_seconds(group, nbytes, 3, device)
    if seconds < _ENOUGH_SECONDS:
        nbytes = _LARGE_BYTES
        seconds = _all_reduce_seconds(group, nbytes, 3, device)
    sent = 2 * (group.size() - 1) / group.size() * nbytes
    return Link("group", latency, sent / max(seconds, 1e-9))


def _pair_link(group: dist.ProcessGroup, kind: str, peer: int, nbytes: int, device: torch.device) -> Link:
    """One pair; the other ranks wait at the agreement that ends it."""
    one, many = torch.zeros(1, device=device), torch.zeros(nbytes // 4, device=device)
    first = dist.get_global_rank(group, 0)
    other = dist.get_global_rank(group, peer)
    round_trips: list[float] = []
    transfers: list[float] = []
    agree([0.0], group, device)
    if group.rank() in (0, peer):
        for number in range(_LATENCY_REPEATS + 4):
            message, walls = (one, round_trips) if number < _LATENCY_REPEATS else (many, transfers)
            began = time.perf_counter()
            if group.rank() == 0:
                dist.send(message, other, group=group)
                dist.recv(one, other, group=group)
                _settle(device)
                walls.append(time.perf_counter() - began)
            else:
                dist.recv(message, first, group=group)
                _settle(device)
                dist.send(one, first, group=group)
    measured = [0.0, 0.0]
    if group.rank() == 0:
        measured = [statistics.median(round_trips[1:]) / 2, statistics.median(transfers[1:])]
    latency, seconds = agree(measured, group, device)
    return Link(kind, latency, nbytes / max(seconds - latency, 1e-9))


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
