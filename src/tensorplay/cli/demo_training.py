"""What each rank of the demo does: train the GPT under every hook in turn, from the same start."""

import gc
import hashlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist

from tensorplay.cli.corpus import Corpus, load_corpus
from tensorplay.cli.demo_plan import DemoPlan
from tensorplay.cli.gpt import GPT, SIZES
from tensorplay.cli.hooks import COMPUTE_ALONE, attach
from tensorplay.cli.training import (
    build_optimizer,
    clip_gradients,
    learning_rate_fraction,
    next_byte_loss,
    validation_bits_per_byte,
)
from tensorplay.compression.collective import traffic
from tensorplay.nn.parallel import DistributedDataParallel

__all__ = ["train_under_each_hook"]

_COLLECTIVE_TIMEOUT = timedelta(minutes=5)
_WARM_UP_STEPS = 5


@dataclass
class _Trace:
    """What one rank saw under one hook; entry i is step i, bytes count from the start of the run."""

    loss_nats: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    received_bytes: list[int] = field(default_factory=list)
    replica: str = ""

    def median_step_seconds(self) -> float:
        """Without the first steps, in which memory is allocated and DDP rebuilds its buckets."""
        return statistics.median(self.step_seconds[min(_WARM_UP_STEPS, len(self.step_seconds) // 2) :])


class _Rank:
    """The state that lasts over all hooks."""

    def __init__(self, plan: DemoPlan, corpus: Corpus, device: torch.device, events: TextIO | None) -> None:
        self.plan, self.corpus, self.device, self._events = plan, corpus, device, events
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def emit(self, **event: Any) -> None:
        """Append one line to the events; only rank 0 has them open."""
        if self._events is not None:
            self._events.write(json.dumps(event) + "\n")
            self._events.flush()

    def run(self, hook: str, steps: int, compute_alone: bool = False) -> None:
        """Train `steps` steps under `hook` and emit what came of it.

        1. Model, optimizer and data start as for every other hook.
        2. Train; bytes are read off the process's counters before and after each step.
        3. Score the validation text, gather every rank's trace, emit the result.
        """
        label = "compute alone" if compute_alone else hook
        self.emit(event="started", hook=label, steps=steps)
        model = GPT(SIZES[self.plan.size], self.plan.seed).to(self.device)
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        parallel = DistributedDataParallel(model, device_ids=device_ids)
        attached = attach(hook, parallel, build_optimizer(model))
        peaks = [group["lr"] for group in attached.optimizer.param_groups]
        trace = _Trace()
        first_sent, first_received = traffic.sent_bytes, traffic.received_bytes
        for step in range(steps):
            begin = time.perf_counter()
            for group, peak in zip(attached.optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * learning_rate_fraction(step, steps)
            inputs, targets = self._batch(step, model)
            attached.optimizer.zero_grad()
            loss = next_byte_loss(parallel, inputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            clip_gradients(model)
            attached.optimizer.step()
            trace.loss_nats.append(loss.item())
            trace.step_seconds.append(time.perf_counter() - begin)
            trace.sent_bytes.append(traffic.sent_bytes - first_sent)
            trace.received_bytes.append(traffic.received_bytes - first_received)
            self.emit(
                event="step", hook=hook, step=step + 1, loss_nats=loss.item(), sent=trace.sent_bytes[-1]
            )
        attached.finish()
        trace.sent_bytes[-1], trace.received_bytes[-1] = (
            traffic.sent_bytes - first_sent,
            traffic.received_bytes - first_received,
        )
        trace.replica = _fingerprint(model)
        score = None
        if not compute_alone:
            score = validation_bits_per_byte(model, self.corpus, self.rank, self.world_size)
        traces: list[Any] = [None] * self.world_size
        dist.all_gather_object(traces, trace)
        self.emit(event="finished", hook=label, result=_result(traces, score, model))
        del parallel, attached, model
        gc.collect()

    def _batch(self, step: int, model: GPT) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self.corpus.training_batch(
            step,
            self.plan.seed,
            self.rank,
            self.world_size,
            self.plan.batch_size,
            model.size.context_bytes,
        )
        return inputs.to(self.device), targets.to(self.device)


def _result(traces: list[_Trace], score: float | None, model: GPT) -> dict[str, Any]:
    """The figures of one hook, from every rank's trace."""
    steps = len(traces[0].loss_nats)
    return {
        "steps": steps,
        "validation_bits_per_byte": score,
        "loss_nats_by_step": [_mean([trace.loss_nats[step] for trace in traces]) for step in range(steps)],
        "sent_bytes_by_step": [_mean([trace.sent_bytes[step] for trace in traces]) for step in range(steps)],
        "sent_bytes_by_rank": [trace.sent_bytes[-1] for trace in traces],
        "received_bytes_by_rank": [trace.received_bytes[-1] for trace in traces],
        "sent_bytes_per_step": _mean([trace.sent_bytes[-1] for trace in traces]) / steps,
        "received_bytes_per_step": _mean([trace.received_bytes[-1] for trace in traces]) / steps,
        "step_seconds": max(trace.median_step_seconds() for trace in traces),
        "replicas_identical": len({trace.replica for trace in traces}) == 1,
        "gradient_bytes": sum(
            parameter.numel() * parameter.element_size() for parameter in model.parameters()
        ),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@torch.no_grad()
def _fingerprint(model: torch.nn.Module) -> str:
    """A checksum of every parameter's bits: equal on all ranks when the replicas are."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _set_thread_count(world_size: int) -> None:
    """Share the cores among the ranks, unless the user has said how many threads a rank gets."""
    if "OMP_NUM_THREADS" not in os.environ:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, available // world_size))


def train_under_each_hook(plan: DemoPlan) -> None:
    """Join the group, run compute alone and then every hook, leave the group.

    Needs the variables that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Sets this
    process's number of threads unless OMP_NUM_THREADS is given.

    Example:
        >>> train_under_each_hook(DemoPlan.load("runs/demo/plan.json"))    # doctest: +SKIP
    """
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    _set_thread_count(plan.ranks)
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if plan.device == "cuda" else "gloo", timeout=_COLLECTIVE_TIMEOUT)
    corpus = load_corpus()
    events = plan.events_path.open("a", encoding="utf-8") if rank == 0 else None
    this = _Rank(plan, corpus, device, events)
    this.emit(
        event="corpus", fingerprint=corpus.fingerprint, files=corpus.files, threads=torch.get_num_threads()
    )
    this.run(COMPUTE_ALONE, plan.compute_alone_steps, compute_alone=True)
    for hook in plan.hooks:
        this.run(hook, plan.steps)
    if events is not None:
        events.close()
    dist.destroy_process_group()
