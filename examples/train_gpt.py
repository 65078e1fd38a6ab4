"""Train a byte-level GPT on real text with DistributedDataParallel and a communication hook, with checkpoints.

    torchrun --nproc-per-node 2 examples/train_gpt.py --hook fp16_compress
    torchrun --nproc-per-node 2 examples/train_gpt.py --hook int4 --checkpoints runs/gpt --every 50
    torchrun --nproc-per-node 2 examples/train_gpt.py --hook int4 --checkpoints runs/gpt --every 50 --resume

Plain DDP lacks the two lines marked (1) and (2), and nothing else.

A checkpoint is a folder: shared.pt holds what is equal on all ranks, rank0.pt, rank1.pt, … what is not: a hook that
compresses keeps on each rank what was lost there so far. A resumed run goes on bit for bit as if it had not stopped,
and with another number of ranks what was lost is dealt out anew.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.cli.corpus import load_corpus
from tensorplay.cli.gpt import GPT, SIZES
from tensorplay.cli.training import (
    build_optimizer,
    clip_gradients,
    learning_rate_fraction,
    next_byte_loss,
    validation_bits_per_byte,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks import register_ddp_comm_hook  # (1)
from tensorplay.nn.parallel import DistributedDataParallel


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hook", default="fp16_compress", help="a registered hook or codec, by name")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", default="small", choices=list(SIZES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path, help="folder to write checkpoints to")
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint, if there is one"
    )
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    if arguments.resume and not arguments.checkpoints:
        raise SystemExit("--resume needs --checkpoints FOLDER")
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    corpus, size = load_corpus(), SIZES[arguments.size]
    gpt = GPT(size, arguments.seed).to(device)
    optimizer = build_optimizer(gpt)
    model = DistributedDataParallel(gpt, device_ids=[device.index] if on_gpus else None)
    shared: dict[str, Any] = {"model": gpt, "optimizer": optimizer}
    per_rank: dict[str, Any] = {}
    per_rank["hook"] = register_ddp_comm_hook(arguments.hook, model).state  # (2)

    step = load(arguments.checkpoints, shared, per_rank, arguments.resume) if arguments.checkpoints else 0
    while step < arguments.steps:
        for group in optimizer.param_groups:
            group["lr"] = size.learning_rate * learning_rate_fraction(step, arguments.steps)
        inputs, targets = corpus.training_batch(
            step, arguments.seed, rank, world_size, size.batch_size, size.context_bytes
        )
        optimizer.zero_grad()
        loss = next_byte_loss(model, inputs.to(device), targets.to(device))
        loss.backward()
        clip_gradients(gpt)
        optimizer.step()
        step += 1
        if rank == 0 and (step % 20 == 0 or step == arguments.steps):
            print(f"step {step}/{arguments.steps}: loss {loss.item():.6f} nats a byte", flush=True)
        if arguments.checkpoints and (step % arguments.every == 0 or step == arguments.steps):
            save(arguments.checkpoints, step, shared, per_rank)

    score = validation_bits_per_byte(gpt, corpus, rank, world_size)
    if rank == 0:
        print(f"validation: {score:.6f} bits per byte with {arguments.hook}")
    dist.destroy_process_group()


def save(folder: Path, step: int, shared: dict[str, Any], per_rank: dict[str, Any]) -> None:
    """Write one checkpoint; its folder gets its final name when every rank has written its part."""
    rank, done = dist.get_rank(), folder / f"step{step:08d}"
    partial = done.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        states = {name: part.state_dict() for name, part in shared.items()}
        torch.save({"step": step, "ranks": dist.get_world_size(), **states}, partial / "shared.pt")
    own = {name: part.state_dict() for name, part in per_rank.items() if hasattr(part, "state_dict")}
    torch.save(own, partial / f"rank{rank}.pt")
    dist.barrier()
    if rank == 0:
        partial.rename(done)
    dist.barrier()


def load(folder: Path, shared: dict[str, Any], per_rank: dict[str, Any], resume: bool) -> int:
    """Restore the last whole checkpoint and return its step; 0 when there is none."""
    whole = sorted(folder.glob("step????????"))
    if not whole:
        return 0
    if not resume:
        raise SystemExit(f"{folder} holds checkpoints: go on from them with --resume, or name another folder")
    saved = torch.load(whole[-1] / "shared.pt", weights_only=True, map_location="cpu")
    for name, part in shared.items():
        part.load_state_dict(saved[name])
    own = [torch.load(whole[-1] / f"rank{rank}.pt", weights_only=True) for rank in range(saved["ranks"])]
    for name, part in per_rank.items():
        if hasattr(part, "load_state_dict") != (name in own[0]):
            raise SystemExit(f"the checkpoint {whole[-1]} was written with another kind of {name}")
        if name in own[0]:
            same_ranks = saved["ranks"] == dist.get_world_size()
            part.load_state_dict(own[dist.get_rank()][name] if same_ranks else [state[name] for state in own])
    return int(saved["step"])


if __name__ == "__main__":
    main()
