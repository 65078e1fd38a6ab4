"""The demo without its ranks: what it refuses, its figures, its plots and its page."""

import argparse
import itertools
import math
import os
import re
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tensorplay.cli import demo, launch
from tensorplay.cli.demo_page import build_page
from tensorplay.cli.demo_plan import DemoPlan
from tensorplay.cli.demo_report import build_report, build_table, least_step_seconds
from tensorplay.cli.hooks import split_hook_names
from tensorplay.cli.main import COMMANDS, main
from tensorplay.cli.plot import Axis, Line, line_plot
from tensorplay.cli.progress import follow_run, readable_bytes
from tests.unit.test_report import CHROMIUM, browse


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(demo, "launch_ranks", refuse)


MISTAKES = {
    "--hooks allreduce,fp17": "no hook is called 'fp17': known are allreduce, ",
    "--hooks allreduce,allreduce": "name each hook once, got allreduce 2 times",
    "--hooks ,": "must name at least one hook; known: allreduce, ",
    "--hooks topk:2": "hook 'topk:2': fraction must be above 0 and at most 1, got 2",
    "--hooks math:no_such_function": "no hook is called 'math:no_such_function'",
    "--hooks math:pi": "'math:pi' must be callable, got float",
    "--hooks diloco:period=0": "period of diloco must be an integer >= 1, got '0'",
    "--hooks diloco:speed=3": "a setting of diloco must be one of period, warmup_steps, codec, got 'speed=3'",
    "--hooks diloco:codec=int3": "codec of diloco: codec must be one of",
    "--ranks 0": "--ranks must be from 1 to ",
    "--ranks 1000000": "--ranks must be from 1 to ",
    "--ranks two": "argument --ranks: invalid int value: 'two'",
    "--steps 0": "--steps must be >= 1, got 0",
    "--seed -1": "--seed must be from 0 to",
    "--batch-size 0": "--batch-size must be >= 1, got 0",
    "--size huge": "argument --size: invalid choice: 'huge'",
    "--out {file}": "must be a folder that can be written: File exists",
    "--out {file}/below": "must be a folder that can be written: Not a directory",
    "--speed 3": "unrecognized arguments: --speed 3",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_starts(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    words = mistake.format(file=tmp_path / "file").split()
    try:
        status = main(["demo", "--out", str(tmp_path / "out"), *words])
    except SystemExit as ended:
        status = int(str(ended.code))
    said = capsys.readouterr()
    assert status == 2
    assert MISTAKES[mistake] in said.err
    assert said.err.startswith("tensorplay")
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not (tmp_path / "out").exists() or "--out" in mistake


def test_more_ranks_than_gpus_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cuda", "--ranks", "13", "--out", str(tmp_path)]) == 2
    assert "--device cuda needs a GPU and nccl for each of the 13 ranks" in capsys.readouterr().err


def test_the_defaults_make_a_plan(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    plan = demo.check_arguments(
        parser.parse_args(["--out", str(tmp_path / "deep" / "out"), "--device", "cpu"])
    )
    assert plan.hooks == ("allreduce", "fp16_compress", "bf16_compress")
    assert (plan.ranks, plan.device, plan.out) == (2, "cpu", tmp_path / "deep" / "out")
    assert plan.out.is_dir()


def test_only_what_an_earlier_run_left_is_cleared(tmp_path: Path) -> None:
    names = ["report.json", "report.html", "error_rank0.json", "rank_logs/log", "thesis.txt"]
    (tmp_path / "rank_logs").mkdir()
    for name in names:
        (tmp_path / name).write_text("before")
    demo._prepare_folder(tmp_path)
    assert all((tmp_path / name).exists() for name in names), "a folder that no run wrote to"
    (tmp_path / "plan.json").write_text("{}")
    demo._prepare_folder(tmp_path)
    assert [name for name in names if (tmp_path / name).exists()] == ["thesis.txt"]


def test_each_command_is_a_module_with_options_and_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"tensorplay {name}" in capsys.readouterr().out


def test_names_are_split_at_the_right_commas() -> None:
    text = "allreduce,int4:group_size=64,rounding=nearest,diloco:period=5,codec=topk:0.01"
    names = ["allreduce", "int4:group_size=64,rounding=nearest", "diloco:period=5,codec=topk:0.01"]
    assert split_hook_names(text) == names


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1, "1 B"), (999, "999 B"), (1000, "1.00 kB"), (87936.0, "87.9 kB"), (2.5e12, "2.50 TB")],
)
def test_bytes_read_with_their_unit(count: float, text: str) -> None:
    assert readable_bytes(count) == text


def test_the_least_step_time_is_the_larger_of_compute_and_wire() -> None:
    assert least_step_seconds(0.1, sent_bytes=1e6, received_bytes=125e6) == pytest.approx(1.0)
    assert least_step_seconds(0.1, sent_bytes=125e6, received_bytes=1e6) == pytest.approx(1.0)
    assert least_step_seconds(0.1, sent_bytes=1e6, received_bytes=1e6) == pytest.approx(0.1)


def make_plan(out: Path, *hooks: str, ranks: int = 2) -> DemoPlan:
    return DemoPlan(ranks, 40, 12, hooks, 1, "tiny", 4, "cpu", out, os.getpid())


def make_result(sent: float, identical: bool = True) -> dict[str, Any]:
    return {
        "steps": 40,
        "validation_bits_per_byte": 3.21098,
        "loss_nats_by_step": [5.5 - step / 10 for step in range(40)],
        "sent_bytes_by_step": [sent * (step + 1) for step in range(40)],
        "sent_bytes_by_rank": [sent * 40] * 2,
        "received_bytes_by_rank": [sent * 40] * 2,
        "sent_bytes_per_step": sent,
        "received_bytes_per_step": sent,
        "step_seconds": 0.25,
        "replicas_identical": identical,
        "gradient_bytes": 8000,
    }


def make_report(out: Path, sent: dict[str, float], ranks: int = 2, identical: bool = True) -> dict[str, Any]:
    events: list[dict[str, Any]] = [{"event": "corpus", "fingerprint": "abc", "files": 3, "threads": 1}]
    events.append({"event": "finished", "hook": "compute alone", "result": make_result(0)})
    for name, count in sent.items():
        events.append({"event": "finished", "hook": name, "result": make_result(count, identical)})
    return build_report(make_plan(out, *sent, ranks=ranks), events, wall_seconds=1.0)


def test_ratios_are_to_the_measured_all_reduce(tmp_path: Path) -> None:
    hooks = make_report(tmp_path, {"allreduce": 8000, "fp16_compress": 4000, "noop": 0})["hooks"]
    assert [hooks[name]["ratio_to_allreduce"] for name in hooks] == [1.0, 2.0, None]


def test_without_all_reduce_its_bytes_are_computed_and_named_so(tmp_path: Path) -> None:
    report = make_report(tmp_path, {"fp16_compress": 6000}, ranks=4)
    assert report["allreduce_bytes_per_step"] == 2 * 3 / 4 * 8000
    assert report["hooks"]["fp16_compress"]["ratio_to_allreduce"] == 2.0
    assert report["allreduce_bytes_source"].startswith("computed")
    assert "its bytes are computed" in build_page(report)


def test_compute_alone_is_never_slower_than_a_step_with_an_exchange(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [{"event": "corpus", "fingerprint": "abc", "files": 3, "threads": 1}]
    events.append(
        {"event": "finished", "hook": "compute alone", "result": {**make_result(0), "step_seconds": 0.3}}
    )
    events.append({"event": "finished", "hook": "allreduce", "result": make_result(8000)})
    report = build_report(make_plan(tmp_path, "allreduce"), events, wall_seconds=1.0)
    assert (report["compute_alone_seconds"], report["run_without_exchange_seconds"]) == (0.25, 0.3)
    assert report["hooks"]["allreduce"]["least_step_seconds_at_1_gbit_computed"] == 0.25


def test_the_table_fits_a_terminal_of_80_columns_and_says_what_is_computed(tmp_path: Path) -> None:
    report = make_report(tmp_path, {"allreduce": 13_031_424, "diloco:period=20,codec=int4": 99_000})
    console = Console(width=80, record=True, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(build_table(report))
    text = console.export_text()
    assert "computed, not measured" in text
    assert re.search(r"allreduce\s+3\.2110\s+13\.0 MB\s+13\.0 MB\s+1\.00 x\s+250 ms\s+250 ms", text)
    assert "…" not in text


def test_replicas_that_differ_are_marked(tmp_path: Path) -> None:
    page = build_page(make_report(tmp_path, {"noop": 0}, identical=False))
    assert "noop †" in page
    assert "replicas differ" in page


class _Page(HTMLParser):
    """Collects what a page loads and what it draws; checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.lines: list[list[tuple[float, float]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        assert not {"src", "href", "srcset", "data"} & set(values), f"<{tag}> loads something"
        assert tag not in ("script", "link", "iframe", "object", "img")
        if tag == "polyline":
            pairs = (pair.split(",") for pair in (values["points"] or "").split())
            self.lines.append([(float(x), float(y)) for x, y in pairs])
        if tag not in ("meta", "br", "line", "rect") or (tag in ("line", "rect") and "/" not in str(values)):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_draws_a_line_a_hook_twice(tmp_path: Path) -> None:
    page = build_page(make_report(tmp_path, {"allreduce": 8000, "<own>:hook&": 4000, "noop": 0}))
    parsed = _Page()
    parsed.feed(page)
    assert parsed.open == []
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in re.sub(r"url\(#clip-\d+\)", "", page)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert "&lt;own&gt;:hook&amp;" in page
    by_step, by_bytes = parsed.lines[:3], parsed.lines[3:]
    assert [len(line) for line in by_step] == [40, 40, 40]
    assert [len(line) for line in by_bytes] == [40, 40, 0], "no bytes, no place on a logarithmic axis"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome found")
def test_a_browser_finds_no_fault_with_the_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(build_page(make_report(tmp_path, {"allreduce": 8000, "noop": 0})))
    document, log = browse(path, tmp_path / "profile")
    assert "Loss against bytes" in document
    assert "CONSOLE" not in log


def test_a_plot_puts_points_where_their_values_say() -> None:
    lines = [Line("a", [0, 5, 10], [1.0, 2.0, 3.0]), Line("b", [1, 2], [math.nan, math.inf])]
    parsed = _Page()
    parsed.feed(line_plot(lines, Axis("x"), Axis("y"), "A plot"))
    (left, bottom), (middle, half), (right, top) = parsed.lines[0]
    assert middle == pytest.approx((left + right) / 2, abs=0.1)
    assert half == pytest.approx((top + bottom) / 2, abs=0.1)
    assert top < bottom
    assert parsed.lines[1] == []


def test_a_logarithmic_axis_turns_ratios_into_distances_and_long_lines_are_thinned() -> None:
    x = [10.0 ** (power / 1000) for power in range(3001)]
    parsed = _Page()
    text = line_plot([Line("a", x, x)], Axis("x", logarithmic=True), Axis("y", logarithmic=True), "A plot")
    parsed.feed(text)
    points = parsed.lines[0]
    assert len(points) <= 402
    steps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(points[:-1])]
    assert max(steps) - min(steps) <= 0.21
    assert ">1000<" in text
    assert ">10<" in text


def test_a_line_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        line_plot([Line("a", [1, 2], [1.0])], Axis("x"), Axis("y"), "A plot")


def failure(rank: int, exitcode: int) -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=exitcode, error_file="none")


def test_a_killed_rank_is_the_cause_not_the_ones_that_lost_it(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    plan.error_path(0).write_text('{"time_seconds": 1.0, "error": "Connection closed", "traceback": "t"}')
    failed = ChildFailedError("demo", {0: failure(0, 1), 1: failure(1, -signal.SIGKILL)})
    assert str(launch._first_failure(plan, failed)) == "rank 1 failed: it was killed by SIGKILL"


def test_the_earliest_error_is_the_cause(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    plan.error_path(0).write_text('{"time_seconds": 2.5, "error": "Connection closed", "traceback": "t"}')
    plan.error_path(1).write_text('{"time_seconds": 2.4, "error": "ValueError: no", "traceback": "here"}')
    failed = ChildFailedError("demo", {0: failure(0, 1), 1: failure(1, 1)})
    cause = launch._first_failure(plan, failed)
    assert (str(cause), cause.rank, cause.details) == ("rank 1 failed: ValueError: no", 1, "here")


def test_a_rank_that_leaves_no_error_is_named_with_its_exit_status(tmp_path: Path) -> None:
    failed = ChildFailedError("demo", {1: failure(1, 3), 0: failure(0, -signal.SIGTERM)})
    cause = launch._first_failure(make_plan(tmp_path), failed)
    assert str(cause) == "rank 1 failed: it ended with exit status 3"
    assert "rank_logs" in cause.details


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_step_loss_bytes_and_keeps_results(tmp_path: Path, terminal: bool) -> None:
    plan = make_plan(tmp_path, "int8")
    plan.events_path.write_text("")
    console = Console(width=140, record=True, force_terminal=terminal, file=open(os.devnull, "w"))  # noqa: SIM115
    lines = ['{"event": "started", "hook": "int8", "steps": 40}\n']
    for step in range(1, 41):
        lines.append(
            f'{{"event": "step", "step": {step}, "loss_nats": {math.log(2)}, "sent": {step * 5000}}}\n'
        )
    lines.append('{"event": "finished", "hook": "int8", "result": {}}\n')
    text = "".join(lines)
    with console.file, follow_run(plan, console) as events, plan.events_path.open("a") as file:
        for part in (text[:70], text[70:333], text[333:]):  # torn in the middle of lines
            file.write(part)
            file.flush()
    shown = console.export_text()
    assert [event["event"] for event in events] == ["started", "finished"]
    assert "loss 1.000 bits/byte, sends 5.00 kB a step" in shown
    assert "40/40" in shown
