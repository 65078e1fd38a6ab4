"""`tensorplay compare` without its ranks: what it refuses, its rows, what it says pays, its page and the figure."""

import argparse
import html
import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tensorplay.cli import compare
from tensorplay.cli.compare_data import (
    build_about,
    build_cell,
    fastest,
    pays,
    plain_hook,
    where_it_does_not_pay,
)
from tensorplay.cli.compare_hooks import check_hooks, rhythm
from tensorplay.cli.compare_launch import CellRuns, order_of_rounds
from tensorplay.cli.compare_page import build_page
from tensorplay.cli.compare_plan import Settings
from tensorplay.cli.compare_plot import panel, styles
from tensorplay.cli.compare_table import build_table, table_cells
from tensorplay.cli.lab import Lab, available, bits_per_second
from tensorplay.cli.main import main
from tests.unit.test_report import HARNESS, browse, in_a_browser

REPOSITORY = Path(__file__).parents[2]
SETTINGS = Settings("mlp", 2, 2, 3, 0, 1, 60.0, False)


def result(*seconds: float, sent: float = 0.0, on_wire: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "step_seconds": list(seconds),
        "cpu_seconds": 0.1,
        "sent_bytes": sent,
        "received_bytes": sent,
        "interface_sent_bytes": on_wire,
        "interface_received_bytes": on_wire,
        "peak_memory_bytes": 1000,
        "loss": 2.0,
        "replicas_equal": True,
        "choice": None,
        **more,
    }


def some_runs(scale: float = 1.0) -> CellRuns:
    """Compute alone 0.2 s; plain all-reduce 0.5, fp16 0.4 (`scale` times what is beyond compute), int8 always 0.45."""

    def step(seconds: float) -> float:
        return 0.2 + scale * (seconds - 0.2)

    return CellRuns(
        results={
            "noop": [result(0.2, 0.2), result(0.1, 0.3, replicas_equal=False)],
            "torch:allreduce": [result(step(0.5), step(0.5), on_wire=1.25e7)] * 2,
            "allreduce": [result(step(0.5), step(0.51), sent=1.25e7, on_wire=1.3e7)] * 2,
            "fp16_compress": [result(step(0.4), step(0.4), sent=6.25e6, on_wire=6.5e6)] * 2,
            "int8": [result(0.45, 0.45, sent=3e6, on_wire=3.1e6)] * 2,
            "mine:hook": [result(step(0.6), step(0.6), on_wire=1e6, replicas_equal=False)] * 2,
        },
        failures={"torch:power_sgd": "rank 1 was killed by SIGABRT"},
        parameters=1234,
    )


HOOKS = ("noop", "torch:allreduce", "allreduce", "fp16_compress", "int8", "mine:hook", "torch:power_sgd")


def some_comparison() -> dict[str, Any]:
    cells = [
        build_cell(ranks, rate, HOOKS, some_runs(scale), SETTINGS)
        for ranks in (2, 4)
        for rate, scale in (("200mbit", 5.0), ("1gbit", 1.0), ("unlimited", 0.1))
    ]
    about = build_about(SETTINGS, "tensorplay compare", "made up for a test", 1234)
    return {"format": 1, "made_by": "tensorplay compare", "about": about, "cells": cells}


def test_a_row_can_be_checked_by_hand() -> None:
    cell = build_cell(2, "1gbit", HOOKS, some_runs(), SETTINGS)
    assert [row["hook"] for row in cell["rows"]] == list(HOOKS)
    rows = {row["hook"]: row for row in cell["rows"]}
    assert (cell["compute_seconds"], cell["plain"], cell["fastest"]) == (
        0.2,
        "torch:allreduce",
        "fp16_compress",
    )
    fp16 = rows["fp16_compress"]
    assert fp16["step_seconds"] == 0.4
    assert fp16["exposed_seconds"] == pytest.approx(0.2)
    assert fp16["speedup"] == pytest.approx(1.25)
    assert (fp16["wire_floor_seconds"], fp16["wire_floor_from"]) == (0.05, "counted")  # 50 Mbit at 1 Gbit/s
    assert rows["noop"]["step_seconds_quartiles"] == pytest.approx([0.175, 0.225])  # of 0.1 0.2 0.2 0.3
    # Nobody counts what torch's hooks and a user's own send: the kernel's figure has to do.
    for hook, floor in (("torch:allreduce", 0.1), ("mine:hook", 0.008)):
        assert rows[hook]["sent_bytes"] is None
        assert (rows[hook]["wire_floor_seconds"], rows[hook]["wire_floor_from"]) == (floor, "interface")
    assert rows["noop"]["sent_bytes"] == 0
    failed = rows["torch:power_sgd"]
    assert failed["failure"] == "rank 1 was killed by SIGABRT"
    assert failed["step_seconds"] is None
    assert failed["speedup"] is None
    assert {row["failure"] for hook, row in rows.items() if hook != "torch:power_sgd"} == {None}


def test_a_hook_pays_beyond_three_percent_and_only_with_equal_replicas_is_it_the_fastest() -> None:
    def row(hook: str, seconds: float, equal: bool = True) -> dict[str, Any]:
        return {"hook": hook, "step_seconds": seconds, "speedup": 1 / seconds, "replicas_equal": equal}

    assert not pays(row("a", 1 / 1.029))
    assert pays(row("a", 1 / 1.031))
    rows = [row("noop", 0.1), row("cheat", 0.2, equal=False), row("a", 0.5), row("b", 0.4)]
    assert fastest({"rows": rows}) == "b"
    assert fastest({"rows": rows[:2]}) is None


def test_where_it_does_not_pay_is_told_from_the_figures() -> None:
    comparison = some_comparison()
    told = where_it_does_not_pay(comparison["cells"][:3])
    assert told == [
        "2 ranks, 200mbit: mine:hook 0.77 x; 2 of 3 pay. Plain all-reduce takes 1700 ms a step.",
        "2 ranks, 1gbit: mine:hook 0.83 x; 2 of 3 pay. Plain all-reduce takes 500 ms a step.",
        "2 ranks, unlimited: int8 0.51 x, mine:hook 0.96 x; 1 of 3 pay. Plain all-reduce takes 230 ms a step.",
    ]
    cell = comparison["cells"][2]
    without = {**cell, "rows": [row for row in cell["rows"] if row["hook"] != "fp16_compress"]}
    assert ": no hook pays: int8 0.51 x, mine:hook 0.96 x. " in where_it_does_not_pay([without])[0]
    first = comparison["cells"][0]
    without = {**first, "rows": [row for row in first["rows"] if row["hook"] != "mine:hook"]}
    assert ": every hook pays. " in where_it_does_not_pay([without])[0]
    nothing = build_cell(2, "1gbit", ["noop"], CellRuns(failures={"noop": "no"}), SETTINGS)
    assert where_it_does_not_pay([nothing]) == [
        "2 ranks, 1gbit: plain all-reduce has no figures, so nothing can be said."
    ]


def test_without_torchs_plain_all_reduce_ours_is_what_others_are_held_against() -> None:
    runs = some_runs()
    runs.failures["torch:allreduce"] = "no"
    del runs.results["torch:allreduce"]
    cell = build_cell(2, "1gbit", HOOKS, runs, SETTINGS)
    assert cell["plain"] == "allreduce"
    assert {row["hook"]: row["speedup"] for row in cell["rows"]}["allreduce"] == 1.0
    assert plain_hook([]) is None


def test_over_loopback_there_is_no_floor_and_a_loss_that_is_not_finite_is_null() -> None:
    runs = CellRuns(results={"int8": [result(0.1, sent=1e6, loss=float("nan"))]})
    row = build_cell(2, "loopback", ["int8"], runs, SETTINGS)["rows"][0]
    assert (row["wire_floor_seconds"], row["interface_sent_bytes"], row["loss"]) == (None, None, None)
    assert row["step_seconds_quartiles"] == [0.1, 0.1]
    json.dumps(row, allow_nan=False)


def test_every_round_runs_every_hook_once_and_each_hook_has_every_place() -> None:
    order = order_of_rounds(["a", "b", "c"], rounds=3)
    assert sorted(order) == [(number, hook) for number in range(3) for hook in "abc"]
    assert [[hook for at, hook in order if at == number] for number in range(3)] == [
        list("abc"),
        list("bca"),
        list("cab"),
    ]


def test_hooks_that_exchange_now_and_then_are_sampled_in_whole_periods() -> None:
    assert (rhythm("diloco").period, rhythm("post_localSGD:period=3,warmup_steps=4").period) == (10, 3)
    assert rhythm("post_localSGD:period=3,warmup_steps=4").warmup == 4
    assert rhythm("torch:power_sgd:2").warmup > 2, "its first two steps are plain all-reduce"
    assert rhythm("auto").most_until_settled > 0
    assert (rhythm("int8").period, rhythm("int8").warmup, rhythm("int8").most_until_settled) == (1, 0, 0)


@pytest.mark.parametrize(
    ("rate", "number"), [("200mbit", 2e8), ("2.5gbit", 2.5e9), ("64kbit", 64e3), ("unlimited", None)]
)
def test_rates_are_read(rate: str, number: float | None) -> None:
    assert bits_per_second(rate) == number


MISTAKES = {
    "--model perceptron": "--model must be mlp, mlp:width=N,layers=N,batch=N, gpt:SIZE, or your own",
    "--hooks int9": "no hook is called 'int9'",
    "--hooks int8,int8": "--hooks must name each hook once, got int8 2 times",
    "--hooks ,": "--hooks must name at least one hook; known: ",
    "--hooks torch:int8": "no hook of torch's is called 'torch:int8': known are torch: and allreduce, fp16",
    "--hooks torch:fp16:2": "no hook of torch's is called 'torch:fp16:2'",
    "--hooks torch:power_sgd:0": "the rank of torch:power_sgd must be an integer >= 1, got '0'",
    "--hooks topk:2": "hook 'topk:2': fraction must be above 0 and at most 1, got 2",
    "--ranks 1": "--ranks must be from 2 to ",
    "--ranks 2,two": "--ranks must be from 2 to ",
    "--ranks 2,2": "--ranks must name each once, got 2 2 times",
    "--rates fast": "--rates: a rate must be written like 200mbit, 1gbit or unlimited, got 'fast'",
    "--rates 0mbit": "--rates: a rate must be written like 200mbit",
    "--rates ,": "--rates must name at least one, got ','",
    "--rounds 0": "--rounds must be >= 1, got 0",
    "--steps 0": "--steps must be >= 1, got 0",
    "--warmup 0": "--warmup must be >= 1, got 0",
    "--threads 0": "--threads must be >= 1, got 0",
    "--seed -1": "--seed must be from 0 to",
    "--hook-timeout 0": "--hook-timeout must be > 0 seconds, got 0",
    "--links cable": "argument --links: invalid choice: 'cable'",
    "--out {file}": "must be a folder that can be written: File exists",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_starts(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "run_cell", lambda *_: pytest.fail("ranks were started"))
    (tmp_path / "file").write_text("")
    words = mistake.format(file=tmp_path / "file").split()
    try:
        status = main(["compare", "--out", str(tmp_path / "out"), *words])
    except SystemExit as ended:
        status = int(str(ended.code))
    said = capsys.readouterr()
    assert status == 2
    assert MISTAKES[mistake] in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not (tmp_path / "out").exists()


def chosen(tmp_path: Path, *words: str) -> compare.Choices:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return compare.check_arguments(parser.parse_args(["--out", str(tmp_path / "out"), *words]))


def test_compute_alone_and_plain_all_reduce_always_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(compare.os, "cpu_count", lambda: 4)
    choices = chosen(tmp_path, "--hooks", "int8", "--ranks", "2,4,8", "--links", "loopback")
    assert choices.hooks == ("noop", "torch:allreduce", "int8")
    assert chosen(tmp_path, "--hooks", "allreduce,noop").hooks == ("allreduce", "noop")
    assert choices.rates == ("loopback",)
    assert "--rates has no effect" in choices.links
    assert {ranks: choices.settings[ranks].threads for ranks in choices.ranks} == {2: 2, 4: 1, 8: 1}
    assert chosen(tmp_path, "--threads", "3").settings[2].threads == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert chosen(tmp_path, "--ranks", "8").settings[8].threads == 2


def test_without_root_it_says_so_and_runs_on_loopback_unless_namespaces_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tensorplay.cli.lab.os.geteuid", lambda: 1000)
    assert available() == "network namespaces need root"
    choices = chosen(tmp_path)
    assert choices.rates == ("loopback",)
    assert choices.links == "this machine's loopback, --rates has no effect: network namespaces need root"
    assert main(["compare", "--links", "namespaces", "--out", str(tmp_path)]) == 2
    assert "--links namespaces: network namespaces need root" in capsys.readouterr().err


def test_every_documented_hook_of_torchs_is_known() -> None:
    plain = [f"torch:{name}" for name in ("allreduce", "fp16", "bf16", "power_sgd", "power_sgd:4")]
    check_hooks(
        [*plain, "torch:quantize_per_tensor", "torch:quantize_per_channel", "torch:batched_power_sgd"]
    )


def test_the_table_marks_the_fastest_and_differing_replicas_and_shows_failures() -> None:
    cell = some_comparison()["cells"][1]
    texts = {row["hook"]: table_cells(row, cell) for row in cell["rows"]}
    assert texts["fp16_compress"][:5] == ["fp16_compress *", "400", "200", "1.25", "50.0"]
    assert texts["mine:hook"][0] == "mine:hook †"
    assert texts["noop"][0] == "noop"
    assert texts["torch:power_sgd"] == ["torch:power_sgd", "failed: rank 1 was killed by SIGABRT"]
    printed = io.StringIO()
    Console(width=80, file=printed).print(build_table(cell))
    text = printed.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for hook in HOOKS:
        assert hook[:12] in text
    assert "torch:power_sgd failed: rank 1 was killed by SIGABRT" in " ".join(text.split())


def test_the_advisors_prediction_stands_beside_the_measurement() -> None:
    runs = some_runs()
    runs.advice = {"best": "int8", "predicted_seconds": {"int8": 0.4, "sign": None}, "probe": {}}
    page = build_page({**some_comparison(), "cells": [build_cell(2, "1gbit", HOOKS, runs, SETTINGS)]})
    assert (
        "the advisor would take int8; it predicted int8 400 ms (measured 450), sign - ms (measured -)" in page
    )


def test_a_panel_puts_rates_by_their_ratios_and_shades_where_nothing_pays() -> None:
    cells = some_comparison()["cells"][:3]
    drawn = styles(HOOKS[:-1])
    text = panel(cells, drawn, "2 ranks")
    points = re.search(rf'var\({drawn["int8"].colour}\); fill: none".*?points="([^"]+)"', text)
    assert points is not None
    places = [float(point.split(",")[0]) for point in points[1].split()]
    assert len(places) == 2, "a link without a limit is no rate: a dot of its own"
    assert text.count("<circle") == 3 * len(drawn)
    assert "no hook helps" not in text
    slow = {**cells[2], "rows": [row for row in cells[2]["rows"] if row["hook"] != "fp16_compress"]}
    assert panel([*cells[:2], slow], drawn, "2 ranks").count("no hook helps") == 1
    hollow = f'stroke: var({drawn["int8"].colour}); fill: var(--ground)"><title>int8, unlimited'
    filled = f'stroke: var({drawn["int8"].colour}); fill: var({drawn["int8"].colour})"><title>int8, 1gbit'
    assert hollow in text
    assert filled in text


def test_the_page_stands_alone() -> None:
    comparison = some_comparison()
    comparison["cells"][0]["rows"][-1]["failure"] = "<b>bold</b>"
    page = build_page(comparison)
    for loads in ("<script", "<link", "<img", "<iframe", "http://", "https://", "url(", "src=", "href="):
        assert loads not in page
    assert "prefers-color-scheme: dark" in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "<h2>Where it does not pay</h2>" in page
    assert page.count("<table>") == 6
    assert page.count('<tr class="fastest">') == 6


@in_a_browser
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_browser_finds_no_fault_and_it_reads_on_a_phone(tmp_path: Path, scheme: str) -> None:
    page = tmp_path / "harness.html"
    page.write_text(HARNESS.replace("PAGE", html.escape(build_page(some_comparison()))))
    number = {"dark": 0, "light": 1}[scheme]
    document, log = browse(page, tmp_path / "profile", f"--blink-settings=preferredColorScheme={number}")
    title = re.search(r"<title>(.*?)</title>", document)
    assert title is not None
    seen = json.loads(html.unescape(title[1]))
    assert seen["width"] <= 390, "nothing but the tables' own boxes scrolls sideways"
    ground, ink = (sum(map(int, re.findall(r"\d+", seen[name])[:3])) for name in ("ground", "ink"))
    assert (ground < ink) == (scheme == "dark")
    assert "CONSOLE" not in log


def draw_figure(*paths: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "benchmarks/figure.py", *map(str, paths)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)


def test_the_figure_is_made_from_a_comparison(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text(json.dumps(some_comparison()))
    picture = tmp_path / "figures" / "step_time.svg"
    done = draw_figure(tmp_path / "comparison.json", picture)
    assert done.returncode == 0, done.stderr
    text = picture.read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"200 Mbit/s", "1 Gbit/s", "no limit", "compute alone", "fp16_compress"} <= set(words)
    assert any("Where it does not help, 4 ranks" in word for word in words)
    assert any("int8 0.51 x" in word for word in words)
    assert any("Failed somewhere: torch:power_sgd" in word for word in words)
    assert "prefers-color-scheme: dark" in text
    for loads in ("<script", "<image", "href", "url("):
        assert loads not in text
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.findall("{http://www.w3.org/2000/svg}text"):
        assert float(element.attrib["y"]) < height
        assert float(element.attrib["x"]) + 6.3 * len(element.text or "") < width + 40


def test_the_figure_refuses_what_is_no_comparison(tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    for content, told in (
        ("[", "must be a comparison.json"),
        ('{"format": 9}', "must have format 1, got 9"),
        ('{"format": 1, "cells": [], "about": {}}', "must hold at least one hook with figures"),
    ):
        path.write_text(content)
        done = draw_figure(path, tmp_path / "out.svg")
        assert done.returncode == 1
        assert told in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.skipif(bool(available()), reason=f"no network lab: {available()}")
def test_a_lab_that_cannot_be_built_leaves_nothing_behind() -> None:
    name = "tpbroken"
    with pytest.raises(subprocess.CalledProcessError), Lab(1, "nonsense", name=name):
        pass
    namespaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, timeout=20, check=True)
    assert name not in namespaces.stdout
