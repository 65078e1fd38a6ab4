"""`tensorplay codecs`."""

import json

import pytest

from tensorplay.cli.main import main
from tensorplay.compression.registry import known_codecs


def test_it_lists_every_codec(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs"]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert {line[0].partition(":")[0] for line in lines[1:-2]} == set(known_codecs())
    assert "kB sent, 8 ranks" in text


def test_bytes_follow_the_formula_of_the_route(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", "--json", "fp32", "int4:group_size=500", "--ranks", "2", "4"]) == 0
    rows = {row["codec"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["fp32"]["bits"] == 32
    assert rows["fp32"]["wire_bytes"] == {"2": 4_000_000, "4": 6_000_000}
    int4 = rows["int4:group_size=500"]
    assert int4["wire_bytes"] == {"2": 508_000, "4": 762_000}
    assert int4["bits"] == 4.064
    assert int4["paper"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["int9"], "codec must be one of"),
        (["int8:group_size=3"], "group_size must be at least 2 and a multiple of 2, got 3"),
        (["topk:much"], "fraction must be a number, got 'much'"),
        (["--ranks", "1"], "--ranks must be >= 2, got 1"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
