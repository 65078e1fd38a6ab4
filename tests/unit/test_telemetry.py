"""Telemetry's parts, without ranks: what is known of a result, and when lines reach the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorplay.compression.bucket import Bucket
from tensorplay.compression.rounds import AllReduce, Exchange, Scratch
from tensorplay.telemetry import JSONLinesSink, recorder
from tensorplay.telemetry.meter import Meter, metered
from tensorplay.telemetry.recorder import BucketWatch

INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.ones(5), False),
        (torch.full((5,), 1e30), False),  # the sum of squares overflows, no value does
        (torch.full((5,), 1e30).double() ** 8, False),
        (torch.tensor([1.0, NAN]), True),
        (torch.tensor([1.0, INFINITY]), True),
        (torch.tensor([INFINITY, -INFINITY]), True),
        (torch.tensor([1.0, NAN], dtype=torch.float64), True),
        (torch.full((8,), 6e4).half(), False),
        (torch.tensor([1.0, INFINITY]).half(), True),
        (torch.tensor([1.0, -INFINITY]).bfloat16(), True),
        (torch.tensor([1 + 1j, complex(0, NAN)]), True),
        (torch.tensor([1 + 1j, 2.0]), False),
        (torch.tensor([[1.0, NAN], [1.0, 1.0]])[:, 0], False),  # not contiguous
        (torch.tensor([[1.0, NAN], [1.0, 1.0]])[:, 1], True),
        (torch.zeros(0), False),
        (torch.tensor(INFINITY), True),
        (torch.tensor([[0.0, 2.0]]).to_sparse(), False),
        (torch.tensor([[0.0, NAN]]).to_sparse(), True),
    ],
)
def test_values_that_are_not_finite_are_found(values: torch.Tensor, expected: bool) -> None:
    assert recorder._has_nonfinite(values) is expected


def exchange(verdict: object, rounds: int = 1) -> Callable[[Scratch], Exchange]:
    def start(scratch: Scratch) -> Exchange:
        for _ in range(rounds):
            yield AllReduce([])
        return verdict

    return start


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("verdict", [True, False, None])
def test_a_meter_keeps_an_exchanges_verdict_and_passes_it_on(verdict: object, rounds: int) -> None:
    meter, ended = Meter(), []
    running = metered(exchange(verdict, rounds), meter, lambda: ended.append(True))(Scratch())
    returned = []

    def drain() -> Exchange:
        returned.append((yield from running))

    seen = 0
    for _ in drain():
        assert not ended
        seen += 1
    assert returned == [verdict]
    assert (seen, ended, meter.finite) == (rounds, [True], verdict)


def watched(buffer: torch.Tensor, verdicts: list[object], is_read: bool = True) -> BucketWatch:
    watch = BucketWatch(Bucket.of_tensors({"weight": buffer}), None, True, is_read)
    for start in [metered(exchange(verdict), watch.meter(), watch.one_done) for verdict in verdicts]:
        list(start(Scratch()))
    return watch


def test_a_result_is_read_only_where_an_exchange_does_not_judge_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = recorder._has_nonfinite

    def reading(tensor: torch.Tensor) -> Any:
        read.append(tensor.numel())
        return real(tensor)

    monkeypatch.setattr(recorder, "_has_nonfinite", reading)
    assert watched(torch.ones(4), [True, True]).figures()["nonfinite"] is False
    assert watched(torch.full((4,), NAN), [True, False]).figures()["nonfinite"] is True
    assert read == []
    assert watched(torch.ones(4), [True, None]).figures()["nonfinite"] is False
    assert watched(torch.full((4,), NAN), [None]).figures()["nonfinite"] is True
    # what an exchange finds finite in float32 may be infinite once it is rounded to the bucket's type
    assert watched(torch.full((4,), INFINITY).half(), [True]).figures()["nonfinite"] is True
    assert read == [4, 4, 4]


def test_what_an_exchange_finds_is_told_where_results_are_not_read() -> None:
    nan = torch.full((4,), NAN)
    assert watched(nan, [None, False], is_read=False).figures()["nonfinite"] is True
    assert watched(nan.half(), [False], is_read=False).figures()["nonfinite"] is True
    assert watched(torch.ones(4).half(), [True], is_read=False).figures()["nonfinite"] is None
    assert watched(torch.ones(4), [None, True], is_read=False).figures()["nonfinite"] is None


def test_slices_in_memory_of_their_own_are_read_one_by_one() -> None:
    bucket = Bucket.of_tensors({"a": torch.ones(4), "b": torch.tensor([1.0, NAN])})
    watch = BucketWatch(bucket, None, True)
    list(metered(exchange(None), watch.meter(), watch.one_done)(Scratch()))
    figures = watch.figures()
    assert (figures["raw_bytes"], figures["nonfinite"]) == (24, True)


def test_lines_reach_the_file_with_their_step(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    sink = JSONLinesSink(path)
    sink.write({"event": "bucket", "step": 1, "bucket": 0})
    assert path.read_text() == ""
    sink.write({"event": "step", "step": 1, "seconds": NAN, "name": "naïve\n"})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"event": "bucket", "step": 1, "bucket": 0},
        {"event": "step", "step": 1, "seconds": None, "name": "naïve\n"},
    ]
    sink.write({"event": "bucket", "step": 2, "bucket": 0})
    sink.close()
    sink.close()
    assert len(path.read_text().splitlines()) == 3
