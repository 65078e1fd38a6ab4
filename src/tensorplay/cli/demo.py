"""`tensorplay demo`: train a byte-level GPT under several hooks and show what each sends and costs.

1. Check everything the user chose; a mistake is one line and nothing starts.
2. Start the ranks with PyTorch's elastic launcher; they train under each hook from the same start.
3. Show progress, then a table; write report.json, report.html, and its plots as PNG and SVG.
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from tensorplay.cli.command import INTERRUPTED, UsageError
from tensorplay.cli.demo_page import build_page, plots_of
from tensorplay.cli.demo_plan import DemoPlan
from tensorplay.cli.demo_report import build_report, build_table
from tensorplay.cli.gpt import SIZES
from tensorplay.cli.hooks import check_hook_names, split_hook_names
from tensorplay.cli.launch import RankFailedError, launch_ranks
from tensorplay.cli.progress import follow_run
from tensorplay.cli.report_files import write_plots

__all__ = ["add_arguments", "check_arguments", "run"]

_DEFAULT_HOOKS = "allreduce,fp16_compress,bf16_compress"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_arguments(parser)
        >>> parser.parse_args(["--ranks", "4"]).ranks
        4
    """
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: 2)")
    parser.add_argument("--steps", type=int, default=120, help="training steps a hook (default: 120)")
    parser.add_argument(
        "--hooks", default=_DEFAULT_HOOKS, help=f"names, with commas between (default: {_DEFAULT_HOOKS})"
    )
    parser.add_argument("--seed", type=int, default=1, help="of weights and data order (default: 1)")
    parser.add_argument("--size", default="base", choices=list(SIZES), help="of the model (default: base)")
    parser.add_argument(
        "--batch-size", type=int, help="windows of text a rank and step (default: 4, as of every size)"
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=["auto", "cpu", "cuda"],
        help="cpu uses gloo, cuda uses nccl; auto: cuda where every rank gets a GPU (default: auto)",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder (default: runs/demo)")


def check_arguments(arguments: argparse.Namespace) -> DemoPlan:
    """Turn the options into a plan; makes the output folder.

    Raises:
        UsageError: an unknown hook, a count or seed out of range, more ranks than GPUs, a folder that can't
            be written.
    """
    most_ranks = max(16, 4 * (os.cpu_count() or 1))
    if not 1 <= arguments.ranks <= most_ranks:
        raise UsageError(f"--ranks must be from 1 to {most_ranks} on this machine, got {arguments.ranks}")
    if arguments.steps < 1:
        raise UsageError(f"--steps must be >= 1, got {arguments.steps}")
    if not 0 <= arguments.seed < 2**31:
        raise UsageError(f"--seed must be from 0 to {2**31 - 1}, got {arguments.seed}")
    batch_size = SIZES[arguments.size].batch_size if arguments.batch_size is None else arguments.batch_size
    if batch_size < 1:
        raise UsageError(f"--batch-size must be >= 1, got {batch_size}")
    hooks = split_hook_names(arguments.hooks)
    check_hook_names(hooks)
    return DemoPlan(
        ranks=arguments.ranks,
        steps=arguments.steps,
        compute_alone_steps=max(12, min(24, arguments.steps // 5)),
        hooks=tuple(hooks),
        seed=arguments.seed,
        size=arguments.size,
        batch_size=batch_size,
        device=_choose_device(arguments.device, arguments.ranks),
        out=_prepare_folder(arguments.out),
        launcher_process=os.getpid(),
    )


def _choose_device(device: str, ranks: int) -> str:
    gpus = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
    if device == "cuda" and gpus < ranks:
        raise UsageError(
            f"--device cuda needs a GPU and nccl for each of the {ranks} ranks, found {gpus}; use --device cpu"
        )
    if device == "auto":
        return "cuda" if gpus >= ranks else "cpu"
    return device


def _prepare_folder(out: Path) -> Path:
    """Make the folder, prove that it can be written, and clear the marks of an earlier run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        earlier_run = (out / "plan.json").exists()
        (out / "events.jsonl").write_text("", encoding="utf-8")
        if earlier_run:
            for old in [*out.glob("error_rank*.json"), out / "report.json", out / "report.html"]:
                old.unlink(missing_ok=True)
            for folder in ("rank_logs", "report-plots"):
                shutil.rmtree(out / folder, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"--out {out} must be a folder that can be written: {error.strerror}") from error
    return out.resolve()


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; see the module's docstring. Returns 0, 1 when a rank failed, 130 after Ctrl-C.

    Raises:
        UsageError: as in check_arguments, before anything starts.
    """
    plan = check_arguments(arguments)
    console = Console()
    console.print(_summary(plan), highlight=False, soft_wrap=True)
    begin = time.monotonic()
    try:
        with follow_run(plan, console) as events:
            launch_ranks(plan, plan.save())
    except RankFailedError as failed:
        sys.stderr.write(failed.details.rstrip() + "\n")
        print(f"tensorplay demo: error: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tensorplay demo: stopped, all ranks have ended", file=sys.stderr)
        return INTERRUPTED
    report = build_report(plan, events, time.monotonic() - begin)
    (plan.out / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (plan.out / "report.html").write_text(build_page(report), encoding="utf-8")
    write_plots(plots_of(report["hooks"]), plan.out / "report-plots")
    console.print(build_table(report))
    console.print(
        f"{plan.out / 'report.html'}, report.json, and the plots as PNG and SVG in report-plots",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _summary(plan: DemoPlan) -> str:
    backend = "nccl" if plan.device == "cuda" else "gloo"
    return (
        f"{plan.size} byte-level GPT on the Python standard library's source: {plan.ranks} ranks on {backend}, "
        f"{plan.steps} steps under each of {', '.join(plan.hooks)}"
    )
