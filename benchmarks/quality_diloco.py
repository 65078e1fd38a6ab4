"""What averaging seldom costs in quality: bits per byte and bytes sent, at equal steps, on real ranks.

    torchrun --nproc-per-node 4 benchmarks/quality_diloco.py --out FILE [--steps 1000] METHOD …

Every method trains the byte-level GPT of `tensorplay demo` (size "small", 1.4 million parameters) from the same start
on the same data. A method already in FILE with the same settings is not run again: a long table is made in pieces.

Methods:
    allreduce                      plain DDP
    post_local:PERIOD              gradients averaged for a tenth of the steps, then parameters every PERIOD steps
    hierarchical:PERIOD            after the same tenth, over 2 ranks every PERIOD steps and over all every 4 x PERIOD
    diloco:PERIOD:CODEC            CODEC "none" or a registered one, its own parameters after "/": topk/0.01
    diloco:PERIOD:CODEC:KEY=VALUE:…
                                   fragments, overlap, lr and momentum of the outer optimizer (1, 0, 0.7, 0.9),
                                   inner: peak rate of the inner one (that of the demo)

All replicas are brought together at the end, and scored. Bytes are what a rank handed to collectives, per step.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.cli.corpus import Corpus, load_corpus
from tensorplay.cli.gpt import GPT, SIZES
from tensorplay.cli.training import (
    build_optimizer,
    clip_gradients,
    learning_rate_fraction,
    next_byte_loss,
    validation_bits_per_byte,
)
from tensorplay.compression.collective import traffic
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from tensorplay.distributed.algorithms.model_averaging import (
    DiLoCoAverager,
    HierarchicalModelAverager,
    PeriodicModelAverager,
)
from tensorplay.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer


@dataclass
class Method:
    """What trains: the module to call, the optimizer to step, and what brings the replicas together."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], Any]


def build(name: str, model: GPT, steps: int) -> Method:
    """Set one method up on a fresh model."""
    kind, *settings = name.split(":")
    inner = build_optimizer(model)
    if kind == "diloco":
        codec = None if settings[1] == "none" else settings[1].replace("/", ":")
        given = dict(setting.split("=") for setting in settings[2:])
        momentum = float(given.pop("momentum", 0.9))
        inner_lr = float(given.pop("inner", model.size.learning_rate))
        for group in inner.param_groups:
            group["lr"] = inner_lr
        outer = partial(
            torch.optim.SGD, lr=float(given.pop("lr", 0.7)), momentum=momentum, nesterov=momentum > 0
        )
        averager: Any = DiLoCoAverager(
            model,
            outer,
            int(settings[0]),
            codec=codec,
            num_fragments=int(given.pop("fragments", 1)),
            overlap_steps=int(given.pop("overlap", 0)),
        )
        if given:
            raise ValueError(f"diloco knows fragments, overlap, lr, momentum and inner, got {sorted(given)}")
        return Method(model, PostLocalSGDOptimizer(inner, averager), averager.average_now)
    ddp = DistributedDataParallel(model)
    if kind == "allreduce":
        ddp.register_comm_hook(None, allreduce_hook)
        return Method(ddp, inner, lambda: None)
    warmup_steps, period = steps // 10, int(settings[0])
    state = PostLocalSGDState(None, None, warmup_steps, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, post_localSGD_hook)
    if kind == "post_local":
        averager = PeriodicModelAverager(period, warmup_steps)
    elif kind == "hierarchical":
        levels = {period: 2, 4 * period: dist.get_world_size()}
        averager = HierarchicalModelAverager(levels, warmup_steps, phase="warmup")
    else:
        raise ValueError(f"method must be allreduce, post_local, hierarchical or diloco, got {kind!r}")
    return Method(ddp, PostLocalSGDOptimizer(inner, averager), averager.average_now)


def train(name: str, corpus: Corpus, size: str, steps: int, batch_size: int, seed: int) -> dict[str, Any]:
    """Train under one method; returns its row."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(SIZES[size], seed)
    method = build(name, model, steps)
    peaks = [group["lr"] for group in method.optimizer.param_groups]
    before = traffic.sent_bytes
    begin = time.perf_counter()
    for step in range(steps):
        for group, peak in zip(method.optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * learning_rate_fraction(step, steps)
        inputs, targets = corpus.training_batch(
            step, seed, rank, world_size, batch_size, model.size.context_bytes
        )
        method.optimizer.zero_grad()
        next_byte_loss(method.module, inputs, targets).backward()
        clip_gradients(model)
        method.optimizer.step()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"{name}: step {step + 1}, {time.perf_counter() - begin:.0f} s", flush=True)
    method.finish()
    sent = traffic.sent_bytes - before
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    every = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(every, flat)
    return {
        "method": name,
        "size": size,
        "steps": steps,
        "batch_size": batch_size,
        "seed": seed,
        "ranks": world_size,
        "parameters": flat.numel(),
        "validation_bits_per_byte": validation_bits_per_byte(model, corpus, rank, world_size),
        "sent_bytes_per_step": sent / steps,
        "replicas_identical": all(torch.equal(every[0], other) for other in every),
        "seconds": time.perf_counter() - begin,
        "corpus": corpus.fingerprint,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of averaging methods at equal steps.")
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--batch-size", type=int, help="windows a rank and step; the size's own if not given")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    corpus = load_corpus()
    rows: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    batch_size = options.batch_size or SIZES[options.size].batch_size
    settings = {
        "size": options.size,
        "steps": options.steps,
        "batch_size": batch_size,
        "seed": options.seed,
        "ranks": dist.get_world_size(),
    }
    for name in options.methods:
        if any({**row, **settings, "method": name} == row for row in rows):
            continue
        rows.append(train(name, corpus, options.size, options.steps, batch_size, options.seed))
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
            print(json.dumps(rows[-1]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
