"""Runs exchanges: in the threads of a lane on CPU, inline on a side stream on a device.

A lane belongs to a group and a key. Exchanges start in the order in which they were submitted and a few run side by
side, so that one is encoding while another is on the wire; their messages carry the number of the exchange, so nothing
depends on which of them is faster on which rank. The oldest unfinished exchange is running, or about to, on every
rank, which is why the lane can't lock up.

When an exchange fails on one rank, that rank writes its error to the store and closes the lane: the others fail at
once and raise the same text. A lane that failed stays closed.
"""

import atexit
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.collective import (
    GroupChannel,
    LaneChannel,
    Traffic,
    WireError,
    group_store,
    group_timeout,
    traffic,
)
from tensorplay.compression.rounds import MAX_ROUNDS, Exchange, Scratch, run_exchange

__all__ = ["InlineLane", "Lane", "LaneError", "ThreadLane", "forget_lane", "lane_for"]

Start = Callable[[Scratch], Exchange]


class LaneError(RuntimeError):
    """An exchange failed, here or on another rank; the text names the rank."""


@dataclass
class _Job:
    start: Start
    message: int
    done: "torch.futures.Future[BaseException | None]"


class Lane:
    """Where a state's exchanges run; `submit` must be called in an order that is equal on all ranks."""

    rank: int
    world_size: int
    traffic: Traffic

    def submit(self, start: Start) -> "torch.futures.Future[BaseException | None]":
        """Queue an exchange; the future's value is None when it is done, or the exception that ended it."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this rank failed outside an exchange."""
        raise NotImplementedError

    def scratch_bytes(self) -> int:
        """Bytes of scratch held by the lane's workers."""
        raise NotImplementedError


class _Shared:
    """What a lane's threads need; the threads hold this and not the lane, so a forgotten lane can end."""

    def __init__(
        self, make_channel: Callable[[], LaneChannel], rank: int, workers: int, drop_at_most: float
    ) -> None:
        self.make_channel = make_channel
        self.rank = rank
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.idle = threading.Condition(self.lock)
        self.channel: LaneChannel | None = None
        self.running = 0
        self.failure: str | None = None
        self.scratches = [Scratch() for _ in range(workers)]
        self.drop_at_most_seconds = drop_at_most

    def connected(self) -> LaneChannel:
        with self.lock:
            if self.channel is None:
                self.channel = self.make_channel()
                self.channel.connect()
            return self.channel

    def work(self, scratch: Scratch) -> None:
        while (job := self.jobs.get()) is not None:
            error = self._run(job, scratch)
            done = job.done
            del job
            done.set_result(error)
            del done, error
        self.jobs.put(None)  # pass the end on to the next worker

    def _run(self, job: _Job, scratch: Scratch) -> BaseException | None:
        if self.failure is not None:
            return LaneError(self.failure)
        with self.lock:
            self.running += 1
        own_fault = True
        try:
            channel = self.connected()
            run_exchange(job.start(scratch), channel, job.message, scratch)
        except BaseException as error:
            own_fault = not isinstance(error, WireError)
            text = f"{type(error).__name__}: {error}"
            where = "".join(traceback.format_exception(error))
            with self.lock:
                self.failure = self.failure or (f"rank {self.rank} failed: {text}" if own_fault else text)
            del error
        else:
            with self.lock:
                self.running -= 1
                self.idle.notify_all()
            return None
        return self._spread(text, where, own_fault)

    def _spread(self, text: str, where: str, own_fault: bool) -> LaneError:
        """Agree with the peers on what failed.

        1. The running count is given up first: the lane's group can only close when nobody waits in it.
        2. An own fault is written to the store, then the lane closes; the peers' waits end.
        3. A failed wait asks the store who failed; only then does this rank close as well.
        """
        with self.lock:
            self.running -= 1
            self.idle.notify_all()
            self.idle.wait_for(lambda: self.running == 0, timeout=self.drop_at_most_seconds)
            channel = self.channel
        verdict: str | None
        if own_fault:
            verdict = f"rank {self.rank} failed: {text}"
            if channel is not None:
                channel.failures.report(verdict, channel.close)
        else:
            verdict = channel.failures.explain() if channel is not None else None
            if verdict is None:
                verdict = f"the rendezvous store does not answer (the rank that hosts it has ended): {text}"
            elif not verdict:
                verdict = f"rank {self.rank} lost its connection: {text}"
            if channel is not None:
                channel.close()
        self.failure = verdict
        return LaneError(f"{verdict}\n[seen on rank {self.rank}]\n{where}" if own_fault else verdict)


class ThreadLane(Lane):
    """A lane for CPU tensors: worker threads on a private Gloo group.

    Args:
        group: whose ranks take part. key: names the purpose, equal on all ranks (model and state).
        workers: exchanges that run side by side.
    """

    def __init__(self, group: dist.ProcessGroup, key: str, workers: int = 2) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self.traffic = Traffic(traffic)
        prefix = f"tensorplay/{group.group_name}/{key}/{_next_generation(group, key)}"
        store, timeout, rank, world_size = (
            group_store(group),
            group_timeout(group),
            self.rank,
            self.world_size,
        )
        counter = self.traffic
        self._shared = _Shared(
            lambda: LaneChannel(store, rank, world_size, timeout, prefix, counter),
            rank,
            workers,
            timeout.total_seconds(),
        )
        self._message = 0
        for number, scratch in enumerate(self._shared.scratches):
            thread = threading.Thread(
                target=self._shared.work, args=(scratch,), name=f"tensorplay-lane-{key}-{number}", daemon=True
            )
            _remember(thread, self._shared.jobs)
            thread.start()
        self._end = weakref.finalize(self, self._shared.jobs.put, None)
        self._end.atexit = False  # `_end_workers` does it, and waits

    def submit(self, start: Start) -> "torch.futures.Future[BaseException | None]":
        done: torch.futures.Future[BaseException | None] = torch.futures.Future()
        self._shared.jobs.put(_Job(start, self._message, done))
        self._message += MAX_ROUNDS
        return done

    def fail(self, error: BaseException) -> None:
        """Report an error that arose outside an exchange; a thread does it, the caller only queues it."""

        def raising(scratch: Scratch) -> Exchange:
            raise error
            yield  # makes it a generator

        self.submit(raising)

    def scratch_bytes(self) -> int:
        return sum(scratch.nbytes() for scratch in self._shared.scratches)

    @property
    def failure(self) -> str | None:
        """What closed the lane, or None."""
        return self._shared.failure


class InlineLane(Lane):
    """Runs each exchange in the caller's thread, on a side stream where the tensors live on a device.

    Not measured on a GPU yet.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self.traffic = Traffic(traffic)
        self._channel = GroupChannel(group, self.traffic)
        self._scratch = Scratch()
        self._device = device
        self._stream: Any = torch.Stream(device) if device.type != "cpu" else None

    def submit(self, start: Start) -> "torch.futures.Future[BaseException | None]":
        devices: Any = [self._device] if self._stream is not None else None
        done: torch.futures.Future[BaseException | None] = torch.futures.Future(devices=devices)
        if self._stream is None:
            run_exchange(start(self._scratch), self._channel, 0, self._scratch)
            done.set_result(None)
            return done
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            run_exchange(start(self._scratch), self._channel, 0, self._scratch)
            done.set_result(None)
        return done

    def fail(self, error: BaseException) -> None:
        """Nothing to do: the error is raised in the caller's thread, where the launcher sees it."""

    def scratch_bytes(self) -> int:
        return self._scratch.nbytes()


_workers: "weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[_Job | None]]" = (
    weakref.WeakKeyDictionary()
)
_END_SECONDS = 5.0


def _remember(worker: threading.Thread, jobs: "queue.SimpleQueue[_Job | None]") -> None:
    if not _workers:
        atexit.unregister(_end_workers)
        atexit.register(_end_workers)
    _workers[worker] = jobs


def _end_workers() -> None:
    """Let the workers end before the interpreter does.

    A worker that drops its lane's group while the interpreter closes would abort the process. One that is waiting for
    a peer can't end, and does no harm: it is left behind after `_END_SECONDS`.
    """
    workers = [(worker, jobs) for worker, jobs in _workers.items() if worker.is_alive()]
    for _, jobs in workers:
        jobs.put(None)
    deadline = time.monotonic() + _END_SECONDS
    for worker, _ in workers:
        worker.join(max(0.0, deadline - time.monotonic()))


_lanes: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, str], Lane]]" = (
    weakref.WeakKeyDictionary()
)
_lanes_lock = threading.Lock()


def _next_generation(group: dist.ProcessGroup, key: str) -> int:
    """How often this rank has made this lane on this store: equal on all ranks, whatever else a process has done."""
    counter = f"tensorplay/{group.group_name}/{key}/generation/{group.rank()}"
    return int(group_store(group).add(counter, 1))


def lane_for(
    group: dist.ProcessGroup, key: str, device: torch.device, inline: bool = False, workers: int = 2
) -> Lane:
    """Return the lane of `group` for `key`, making it when it is the first call.

    Args:
        group: whose ranks take part; the lane lives as long as the group.
        key: names the user of the lane, equal on all ranks. Users that share a key must submit in one order.
        device: where the tensors are. CPU tensors get a `ThreadLane`, others an `InlineLane`.
        inline: run CPU exchanges in the caller's thread on the group itself.
        workers: exchanges of a `ThreadLane` that run side by side; the first call decides.
    """
    kind = "inline" if inline or device.type != "cpu" else "thread"
    with _lanes_lock:
        lanes = _lanes.setdefault(group, {})
        lane = lanes.get((key, kind))
        if lane is None:
            lane = InlineLane(group, device) if kind == "inline" else ThreadLane(group, key, workers)
            lanes[key, kind] = lane
        return lane


def forget_lane(lane: Lane) -> None:
    """Let a lane end once nobody holds it, instead of with its group; its next user gets a new one.

    Call it on all ranks alike, when every exchange of the lane is done on every rank.
    """
    with _lanes_lock:
        for lanes in _lanes.values():
            for key in [key for key, held in lanes.items() if held is lane]:
                del lanes[key]
