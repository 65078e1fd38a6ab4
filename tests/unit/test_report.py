"""`tensorplay report`: numbers that can be checked by hand, and the page in a real browser."""

import argparse
import html
import http.server
import json
import re
import shutil
import struct
import subprocess
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tensorplay.cli import report, report_files
from tensorplay.cli.command import UsageError
from tensorplay.cli.report_charts import Bar, bar_chart, heat_map
from tensorplay.cli.report_data import FORMAT, read_run, read_runs, summarise, tell_apart
from tensorplay.cli.report_files import HeatMap, file_stems, write_plots
from tensorplay.cli.report_page import build_page, plots_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome found"
)


def write_run(path: Path, hook: str, steps: int = 6, **changes: Any) -> Path:
    """A run of 2 ranks: 1000 raw bytes a step, 250 sent, 40 ms a step of which 10 ms exposed."""
    records: list[dict[str, Any]] = [
        {"event": "run", "format": FORMAT, "hook": hook, "rank": 0, "world_size": 2, "backend": "gloo"}
        | {"torch": "2.13.0", "error_every": 2}
    ]
    for step in range(1, steps + 1):
        records.append({"event": "scalars", "step": step, "time_seconds": 0.04 * step, "loss": 4.0 / step})
        for name, error, norm in (("0.weight", 0.01 * step, 3.0), ("0.bias <b>", 0.0, 4.0)):
            if step % 2 == 0:
                records.append(
                    {
                        "event": "error",
                        "step": step,
                        "parameter": name,
                        "relative_error": error,
                        "mean_norm": norm,
                    }
                )
        records.append(
            {"event": "step", "step": step, "time_seconds": 0.04 * step}
            | {"step_seconds": 0.04 if step > 1 else None, "exposed_seconds": 0.01, "raw_bytes": 1000}
            | {"sent_bytes": 250, "received_bytes": 250, "encode_seconds": 0.002, "wait_seconds": 0.005}
            | {"decode_seconds": 0.001, "nonfinite": step == 3, **changes}
        )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_run_is_summed_up(tmp_path: Path) -> None:
    summary = summarise(read_run(write_run(tmp_path / "a.jsonl", "int8")))
    assert (summary.step_count, summary.nonfinite_steps, summary.sent_bytes) == (6, 1, 250)
    assert summary.fewer_bytes == 4
    assert not summary.is_partly_looked_at
    assert summary.step_seconds == pytest.approx(0.04)
    assert summary.compute_seconds == pytest.approx(0.03)
    assert summary.encode_seconds == pytest.approx(0.0025)
    assert summary.wait_seconds == pytest.approx(0.00625)
    assert summary.decode_seconds == pytest.approx(0.00125)
    assert summary.error == pytest.approx(0.06 * 3 / 5)
    assert summary.last_loss == pytest.approx(4 / 6)


def test_steps_that_nobody_looked_at_are_told_from_finite_ones(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a.jsonl", "allreduce", nonfinite=None)
    assert summarise(read_run(path)).is_partly_looked_at
    assert "<td>none seen</td>" in build_page([read_run(path)])


def test_what_is_unknown_stays_unknown(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a.jsonl", "theirs", steps=1, sent_bytes=None, received_bytes=None))
    summary = summarise(run)
    assert (summary.sent_bytes, summary.fewer_bytes, summary.step_seconds, summary.error) == (None,) * 4
    page = build_page([run])
    assert "Bytes unknown: theirs." in page
    assert "It takes two steps" in page
    assert "Not measured: it is every 2 steps" in page


def test_the_page_holds_every_run_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    runs = tell_apart([read_run(write_run(tmp_path / f"{stem}.jsonl", "int8 & <x>")) for stem in "ab"])
    page = build_page(runs)
    assert "int8 &amp; &lt;x&gt; (a)" in page
    assert "<x>" not in page
    assert "<script" not in page
    assert re.findall(r"(?:src|href)\s*=|url\((?!#)|@import|https?://", page) == []
    body = page[page.index("<body>") : page.index("</body>") + len("</body>")]
    root = ElementTree.fromstring(body.replace("<br>", "<br/>"))
    charts = [svg.get("aria-label") for svg in root.iter("svg") if svg.get("role") == "img"]
    assert [label for label in charts if label and label.startswith("Loss against")] == [
        "Loss against steps",
        "Loss against bytes sent",
        "Loss against time",
    ]
    assert sum(table.get("class") == "map" for table in root.iter("table")) == 2
    row = next(row for row in root.iter("tr") if row[0].text == "int8 & <x> (a)")
    assert [cell.text for cell in row][1:] == (
        ["2", "6", "0.6667", "250 B", "250 B", "4.0 x", "40 ms", "10 ms", "0.036", "1"]
    )


def test_the_stacked_bars_are_as_long_as_their_seconds() -> None:
    text = bar_chart([Bar("a", [0.03, 0.01]), Bar("b", [0.02, 0.0])], ["compute", "wait"])
    assert re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', text) == (
        [("0.00", "540.00"), ("540.00", "180.00"), ("0.00", "360.00"), ("360.00", "0.00")]
    )
    with pytest.raises(ValueError, match="at most 4 parts, got 5"):
        bar_chart([], ["a"] * 5)


def test_a_large_heat_map_shows_the_worst_and_says_so() -> None:
    cells = {(f"p{number}", step): number + step for number in range(100) for step in range(1, 101)}
    text = heat_map(cells, "Error")
    assert text.count('class="cell"') <= 64 * 48
    assert "<th>p99</th>" in text
    assert "<th>p35</th>" not in text
    assert "<th>100</th>" in text
    assert "Of 100 parameters the 64 with the largest last error are shown." in text


def arguments(*runs: Path, output: Path, more: Sequence[str] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return parser.parse_args([*map(str, runs), "--output", str(output), *more])


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "a.jsonl", "int8")
    output = tmp_path / "page.html"
    assert report.run(arguments(path, output=output, more=["--no-plots"])) == 0
    assert output.read_text() == build_page([read_run(path)])
    assert str(output) in capsys.readouterr().out
    assert not (tmp_path / "page-plots").exists()
    with pytest.raises(UsageError, match="No such file"):
        report.run(arguments(path, output=tmp_path / "no" / "page.html"))


STEMS = [
    "loss-against-bytes",
    "loss-against-steps",
    "loss-against-time",
    "relative-error-_-topk-0.1-x",
    "relative-error-int8",
    "step-time",
]


def test_each_plot_is_written_as_png_and_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / "a.jsonl", "int8"), write_run(tmp_path / "b.jsonl", "_$topk:0.1^ & <x>")]
    assert report.run(arguments(*runs, output=tmp_path / "page.html")) == 0
    folder = tmp_path / "page-plots"
    assert str(folder) in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{stem}.{suffix}" for stem in STEMS for suffix in ("png", "svg")
    ]
    for stem in STEMS:
        png = (folder / f"{stem}.png").read_bytes()
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", png[16:24])
        assert width >= 1000
        assert height >= 400
        svg = (folder / f"{stem}.svg").read_text()
        assert "prefers-color-scheme: dark" in svg
        for word in ("xlink:href", "href", "src"):
            assert all(found.startswith("#") for found in re.findall(rf'[ :]{word}="([^"]*)"', svg))
        without_names_of_xml = re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)
        assert re.findall(r"https?://|@import|url\((?!#)|<script|<image", without_names_of_xml) == []
        root = ElementTree.fromstring(svg)
        texts = {text for element in root.iter() for text in [(element.text or "").strip()] if text}
        wanted = {
            "loss-against-steps": {"Loss against steps", "step", "loss", "int8", "_$topk:0.1^ & <x>"},
            "loss-against-bytes": {"sent by this rank since the start", "loss", "1.00 kB"},
            "loss-against-time": {"seconds since the start", "loss"},
            "step-time": {"milliseconds a step", "40 ms", "encode", "wait", "decode", "int8"},
            "relative-error-int8": {"step", "parameter", "0.bias <b>", "|result - mean| / |mean|", "0.06"},
        }
        assert wanted.get(stem, set()) <= texts


def test_plots_go_where_they_are_asked_to_go(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a.jsonl", "int8", steps=1)
    page = tmp_path / "page.html"
    assert report.run(arguments(path, output=page, more=["--plots", str(tmp_path / "x" / "y")])) == 0
    assert sorted(path.name for path in (tmp_path / "x" / "y").iterdir())[:1] == ["loss-against-bytes.png"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        report.run(arguments(path, output=page, more=["--plots", str(tmp_path / "file")]))
    with pytest.raises(SystemExit):
        report.run(arguments(path, output=page, more=["--plots", "x", "--no-plots"]))


def test_the_svg_has_the_dark_colour_of_every_light_one(tmp_path: Path) -> None:
    light, dark = report_files._palettes()
    assert light.keys() == dark.keys()
    assert {"ground", "ink", "quiet", "rule", "line0", "line7"} <= light.keys()
    (_, svg) = write_plots(plots_of([read_run(write_run(tmp_path / "a.jsonl", "int8"))])[:1], tmp_path)
    drawn = set(re.findall(r"(?:fill|stroke): (#\w{6})", svg.read_text().split("</style>", 1)[1]))
    assert drawn
    assert drawn <= set(light.values())


def test_file_names_are_safe_and_differ() -> None:
    stems = file_stems(["../a", "a", "A", "topk:0.01", "", "x" * 300])
    assert stems == ["a", "a-2", "A-3", "topk-0.01", "plot", "x" * 80]


def big_run(path: Path, changes: dict[str, Any]) -> Path:
    """A run as a long training leaves it: 300 parameters, 120 measurements."""
    lines = write_run(path, "int8", steps=240).read_text().splitlines()
    for step in range(2, 241, 2):
        for number in range(300):
            record = {"event": "error", "step": step, "parameter": f"layers.{number}.weight"}
            record |= {"relative_error": 0.01 * number or None, "mean_norm": 1.0}
            lines.append(json.dumps(record | changes))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_hundreds_of_parameters_are_drawn(tmp_path: Path) -> None:
    run = read_run(big_run(tmp_path / "a.jsonl", {}))
    assert "Of 302 parameters the 64" not in build_page([run])  # one has no error, and is no row
    assert "Of 301 parameters the 64" in build_page([run])
    (plot,) = [plot for plot in plots_of([run]) if isinstance(plot, HeatMap)]
    png, svg = write_plots([plot], tmp_path)
    assert struct.unpack(">II", png.read_bytes()[16:24])[0] > 3000
    assert "one in 3 is shown" in svg.read_text()


@pytest.mark.parametrize(
    "losses",
    [
        [1.0, None, 3.0],
        [None, None, None],
        [1e30, 1e30, 1e30],
        [1e300, -1e300, 0.0],
        [0.0, 0.0, 0.0],
        ["NaN", "Infinity", 2.0],
    ],
)
def test_losses_of_any_size_are_drawn(tmp_path: Path, losses: list[Any]) -> None:
    path = write_run(tmp_path / "a.jsonl", "int8", steps=3)
    text = path.read_text()
    for step, loss in enumerate(losses, 1):
        value = loss if isinstance(loss, str) else json.dumps(loss)
        text = re.sub(rf'("event": "scalars", "step": {step},.*"loss": )[\d.]+', rf"\g<1>{value}", text)
    path.write_text(text)
    assert report.run(arguments(path, output=tmp_path / "page.html")) == 0
    page = (tmp_path / "page.html").read_text()
    assert "nan" not in page.lower()
    assert len(read_run(path).losses) == sum(isinstance(loss, float) for loss in losses)


def test_a_file_of_several_runs_is_read_as_several(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a.jsonl", "int8").read_text()
    other = write_run(tmp_path / "b.jsonl", "sign", steps=3).read_text()
    killed = one.split("\n")[0] + "\n"
    both = tmp_path / "both.jsonl"
    both.write_text("\ufeff" + one.replace("\n", "\r\n") + killed + other + one)
    runs = read_runs(both)
    assert [(run.name, len(run.steps), len(run.losses)) for run in runs] == (
        [("int8", 6, 6), ("sign", 3, 3), ("int8", 6, 6)]
    )
    assert [run.name for run in tell_apart(runs)] == ["int8 (both, 1)", "sign", "int8 (both, 3)"]
    with pytest.raises(UsageError, match="holds 3 runs"):
        read_run(both)
    assert report.run(arguments(both, output=tmp_path / "page.html", more=["--no-plots"])) == 0


@pytest.mark.parametrize(
    ("change", "to"),
    [
        ('"world_size": 2', '"world_size": 0'),
        ('"world_size": 2, ', ""),
        ('"raw_bytes": 1000, ', ""),
        ('"exposed_seconds": 0.01', '"exposed_seconds": NaN'),
        ('"nonfinite"', '"other"'),
        ('"parameter": "0.weight", ', ""),
    ],
)
def test_a_record_that_lacks_something_is_named(tmp_path: Path, change: str, to: str) -> None:
    path = write_run(tmp_path / "a.jsonl", "int8")
    text = path.read_text()
    assert change in text
    path.write_text(text.replace(change, to))
    with pytest.raises(UsageError, match=r"a\.jsonl:\d+: not a record"):
        read_run(path)


def test_an_empty_file_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for content in ("", "\n\n"):
        path.write_text(content)
        with pytest.raises(UsageError, match=r"a\.jsonl: empty"):
            read_run(path)
    with pytest.raises(UsageError, match="Is a directory"):
        read_run(tmp_path)
    write_run(path, "int8")
    changed = path.read_text().replace('"mean_norm": 3.0', '"mean_norm": null')
    path.write_text(changed.replace('"mean_norm": 4.0', '"mean_norm": null'))
    assert summarise(read_run(path)).error is None


def test_mistakes_are_told(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a.jsonl", "int8")
    whole = path.read_text()
    path.write_text(whole + '{"event": "st')
    assert len(read_run(path).steps) == 6  # a run that was killed while it wrote
    path.write_text(whole.replace('"event": "error"', "oops", 1))
    with pytest.raises(UsageError, match=r"a\.jsonl:5: not a record"):
        read_run(path)
    path.write_text(whole.replace("telemetry/1", "telemetry/9"))
    with pytest.raises(UsageError, match=r"a\.jsonl:1: not a record of tensorplay\.telemetry/1"):
        read_run(path)
    path.write_text(whole.split("\n")[0] + "\n")
    with pytest.raises(UsageError, match="no step in it"):
        read_run(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text file"):
        read_run(path)


def browse(page: Path, profile: Path, *options: str) -> tuple[str, str]:
    """The document after it has loaded, and what the browser logged."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += ["--enable-logging=stderr", f"--user-data-dir={profile}", "--virtual-time-budget=3000"]
    command += [*options, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


@in_a_browser
def test_the_page_asks_for_nothing_and_a_browser_finds_no_fault(tmp_path: Path) -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = tmp_path / "page.html"
        clean = build_page([read_run(write_run(tmp_path / "a.jsonl", "int8"))])
        page.write_text(clean)
        document, log = browse(page, tmp_path / "profile")
        assert "Loss against steps" in document
        assert "CONSOLE" not in log
        image = f'<img src="http://127.0.0.1:{server.server_port}/x.png">'
        page.write_text(clean.replace("</body>", f"{image}</body>"))
        _, log = browse(page, tmp_path / "profile")
        assert "CONSOLE" in log  # the page's own policy forbids it, and this test would see it
        assert asked == []
    finally:
        server.shutdown()
        server.server_close()


HARNESS = """<!doctype html><iframe width="390" height="800" srcdoc="PAGE"></iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, body = getComputedStyle(page.body);
  const cells = [...page.querySelectorAll("td.cell")].map(cell => getComputedStyle(cell).backgroundColor);
  document.title = JSON.stringify({width: page.documentElement.scrollWidth, ground: body.backgroundColor,
    ink: body.color, cells: cells.length, shades: new Set(cells).size});
};</script>"""


@in_a_browser
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_it_reads_on_a_phone_in_light_and_dark(tmp_path: Path, scheme: str) -> None:
    runs = [read_run(write_run(tmp_path / f"{name}.jsonl", name, steps=40)) for name in ("allreduce", "int8")]
    page = tmp_path / "harness.html"
    page.write_text(HARNESS.replace("PAGE", html.escape(build_page(runs))))
    number = {"dark": 0, "light": 1}[scheme]
    document, _ = browse(page, tmp_path / "profile", f"--blink-settings=preferredColorScheme={number}")
    title = re.search(r"<title>(.*?)</title>", document)
    assert title is not None
    seen = json.loads(html.unescape(title[1]))
    assert seen["width"] <= 390  # nothing but the tables' own boxes scrolls sideways
    assert seen["cells"] == 80
    assert seen["shades"] > 10
    ground, ink = (sum(map(int, re.findall(r"\d+", seen[name])[:3])) for name in ("ground", "ink"))
    assert (ground < ink) == (scheme == "dark")
    assert abs(ground - ink) > 450
