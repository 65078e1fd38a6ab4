"""`tensorplay advise`: which hook pays on this cluster with this model, measured and predicted in under a minute."""

import argparse
import json
import os
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from tensorplay.advisor import DEFAULT_HOOKS, Advice, AdviseSettings, advise
from tensorplay.cli.advise_table import show
from tensorplay.cli.command import UsageError
from tensorplay.cli.compare_advice import hooks_to_advise
from tensorplay.cli.hooks import check_hook_names, split_hook_names
from tensorplay.cli.workload import Workload, check_workload, load_workload
from tensorplay.distributed.algorithms.ddp_comm_hooks._risk import RISKS

__all__ = ["add_arguments", "run"]

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(minutes=5)
_LAYERS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options on `parser`."""
    parser.add_argument(
        "--model",
        help="mlp, mlp:width=N,layers=N,batch=N, gpt:SIZE, or your own as module:function (default: mlp)",
    )
    parser.add_argument(
        "--parameters",
        type=float,
        metavar="N",
        help="instead of --model: an MLP of about this many parameters, as 25e6",
    )
    parser.add_argument(
        "--hooks", help=f"names, separated by commas (default: {','.join(DEFAULT_HOOKS)})", metavar="NAMES"
    )
    parser.add_argument(
        "--max-risk",
        choices=RISKS,
        default="check",
        help="advise no hook of a higher class of risk for accuracy (default: check)",
    )
    parser.add_argument("--no-trial", action="store_true", help="rank by the formula alone, try no hook")
    parser.add_argument(
        "--budget", type=float, default=45.0, metavar="SECONDS", help="for measuring (default: 45)"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="start N ranks on this machine; without it, run under torchrun"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of each rank (default: as torch has it)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure on all ranks, print on rank 0.

    Under torchrun this process is one rank. With --ranks it starts torchrun on this machine, itself being the program.
    """
    settings, model, hooks = _checked(arguments)
    missing = [name for name in _LAUNCHED if name not in os.environ]
    if missing and arguments.ranks is None:
        raise UsageError(
            "run it on your cluster with `torchrun ... -m tensorplay.cli.main advise ...`, or give --ranks N to start "
            "N ranks on this machine"
        )
    if missing:
        return _start(arguments)
    if arguments.ranks not in (None, int(os.environ["WORLD_SIZE"])):
        raise UsageError(
            f"--ranks {arguments.ranks} was given under a launcher of {os.environ['WORLD_SIZE']} ranks: leave it out"
        )
    advice, workload = _advice(arguments, settings, model, hooks)
    if advice is not None:
        print(
            json.dumps({"model": workload.name, **advice.to_dict()}, indent=1)
            if arguments.json
            else show(advice, workload.name)
        )
    return 0


def _checked(arguments: argparse.Namespace) -> tuple[AdviseSettings, str, list[str] | None]:
    """What the options ask for. Raises UsageError for what is against a rule."""
    if arguments.model is not None and arguments.parameters is not None:
        raise UsageError("--model and --parameters exclude each other: give one of them")
    for name in ("ranks", "threads", "parameters"):
        value = getattr(arguments, name)
        if value is not None and not value >= 1:
            raise UsageError(f"--{name} must be >= 1, got {value:g}")
    try:
        settings = AdviseSettings(
            max_risk=arguments.max_risk, trial=not arguments.no_trial, budget_seconds=arguments.budget
        )
    except ValueError as error:
        raise UsageError(str(error).replace("budget_seconds", "--budget")) from error
    hooks = None
    if arguments.hooks is not None:
        hooks = split_hook_names(arguments.hooks)
        check_hook_names(hooks)
        refused = sorted(set(hooks) - set(hooks_to_advise(hooks)))
        if refused:
            raise UsageError(
                f"--hooks must be hooks that average gradients every step, got {', '.join(refused)}"
            )
    model = arguments.model or "mlp"
    if arguments.parameters is not None:
        model = f"mlp:width={max(1, round((arguments.parameters / _LAYERS) ** 0.5))},layers={_LAYERS}"
    check_workload(model)
    return settings, model, hooks


def _start(arguments: argparse.Namespace) -> int:
    """The same command on ranks of this machine; exit status 0 only when all of them had it."""
    threads = arguments.threads or max(1, (os.cpu_count() or 1) // arguments.ranks)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    command += ["-m", "tensorplay.cli.main", "advise", *_again(arguments)]
    return subprocess.run(
        command, check=False, env={**os.environ, "OMP_NUM_THREADS": str(threads)}
    ).returncode


def _again(arguments: argparse.Namespace) -> list[str]:
    """The options that were given, for the ranks."""
    options = [
        "--max-risk",
        arguments.max_risk,
        "--budget",
        str(arguments.budget),
        "--seed",
        str(arguments.seed),
    ]
    for name in ("model", "parameters", "hooks", "threads"):
        if getattr(arguments, name) is not None:
            options += [f"--{name}", str(getattr(arguments, name))]
    return options + [
        flag for flag, on in (("--no-trial", arguments.no_trial), ("--json", arguments.json)) if on
    ]


def _advice(
    arguments: argparse.Namespace, settings: AdviseSettings, model: str, hooks: list[str] | None
) -> tuple[Advice | None, Workload]:
    """Advice on rank 0, None on the others."""
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    on_devices = torch.cuda.is_available() and dist.is_nccl_available()
    device = torch.device("cpu")
    if on_devices:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_devices else "gloo", timeout=_TIMEOUT)
    try:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        workload = load_workload(model, rank, world_size, arguments.seed)
        batches = (_to(batch, device) for batch in workload.endless())
        advice = advise(
            workload.model.to(device),
            batches,
            loss=workload.loss,
            hooks=hooks,
            optimizer=workload.optimizer,
            settings=settings,
        )
        dist.barrier()
        return (advice if rank == 0 else None), workload
    finally:
        dist.destroy_process_group()


def _to(batch: object, device: torch.device) -> object:
    """A batch's tensors on the device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, tuple | list):
        return type(batch)(_to(part, device) for part in batch)
    if isinstance(batch, dict):
        return {key: _to(part, device) for key, part in batch.items()}
    return batch
