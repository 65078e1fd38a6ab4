"""The demo's model, text and training recipe."""

import math
from pathlib import Path

import pytest
import torch

from tensorplay.cli.corpus import load_corpus
from tensorplay.cli.gpt import GPT, SIZES, GPTSize
from tensorplay.cli.training import (
    build_optimizer,
    learning_rate_fraction,
    next_byte_loss,
    validation_bits_per_byte,
)

TEXT = b"for number in range(10):\n    print(number)\n" * 200


def write_library(folder: Path, files: int = 60) -> Path:
    for index in range(files):
        (folder / f"module{index}.py").write_bytes(b"# %d\n" % index + TEXT)
    return folder


@pytest.mark.parametrize(("name", "parameters"), [("small", 1.4e6), ("base", 3.2e6), ("large", 25e6)])
def test_sizes_are_what_they_say(name: str, parameters: float) -> None:
    with torch.device("meta"):
        model = GPT(SIZES[name], seed=1)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(parameters, rel=0.04)


def test_same_seed_same_weights_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (GPT(SIZES["tiny"], seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["bytes.weight"], other["bytes.weight"])


def test_no_byte_sees_what_comes_after_it() -> None:
    model = GPT(SIZES["tiny"], seed=1)
    text = torch.arange(32).unsqueeze(0)
    changed = text.clone()
    changed[0, 20] = 99
    scores, changed_scores = model(text), model(changed)
    torch.testing.assert_close(scores[:, :20], changed_scores[:, :20], rtol=0, atol=0)
    assert not torch.equal(scores[:, 20:], changed_scores[:, 20:])


def test_a_model_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="width must be a multiple of heads, got 32 and 3"):
        GPT(GPTSize(1, 3, 32, 32, 4, 1e-3, 100), seed=1)
    with pytest.raises(ValueError, match="<= 32 bytes long, got 33"):
        GPT(SIZES["tiny"], seed=1)(torch.zeros(1, 33, dtype=torch.long))


def test_an_untrained_model_needs_eight_bits_a_byte_and_training_lowers_it() -> None:
    corpus, model = load_corpus(), GPT(SIZES["tiny"], seed=1)
    before = validation_bits_per_byte(model, corpus, rank=0, world_size=1)
    assert before == pytest.approx(8, abs=0.3)
    optimizer = build_optimizer(model)
    for step in range(40):
        optimizer.zero_grad()
        next_byte_loss(model, *corpus.training_batch(step, 1, 0, 1, 8, 32)).backward()
        optimizer.step()
    assert validation_bits_per_byte(model, corpus, rank=0, world_size=1) < 0.8 * before


def test_bits_per_byte_is_the_cross_entropy_over_every_scored_byte(tmp_path: Path) -> None:
    corpus, model = load_corpus(write_library(tmp_path)), GPT(SIZES["tiny"], seed=1)
    inputs, targets = corpus.validation_windows(SIZES["tiny"].validation_bytes, 32)
    with torch.no_grad():
        by_hand = torch.nn.functional.cross_entropy(
            model(inputs).flatten(0, 1), targets.flatten()
        ) / math.log(2)
    assert validation_bits_per_byte(model, corpus, rank=0, world_size=1) == pytest.approx(
        by_hand.item(), rel=1e-6
    )


def test_text_is_split_by_file_and_never_on_both_sides(tmp_path: Path) -> None:
    for index in range(60):
        (tmp_path / f"module{index}.py").write_bytes(b"# FILE%02d\n" % index + TEXT)
    for left_out in ("test", "__pycache__", "site-packages"):
        (tmp_path / left_out).mkdir()
        (tmp_path / left_out / "more.py").write_bytes(b"# LEFT OUT")
    (tmp_path / "notes.txt").write_bytes(b"# LEFT OUT")
    corpus = load_corpus(tmp_path)
    training, validation = (bytes(part.tolist()) for part in (corpus.training, corpus.validation))
    sides = [(b"FILE%02d" % index in training, b"FILE%02d" % index in validation) for index in range(60)]
    assert all(one != other for one, other in sides)
    assert 1 <= sum(other for _, other in sides) <= 15
    assert b"LEFT OUT" not in training + validation
    assert corpus.files == 60


def test_a_new_file_moves_no_other_to_the_other_side(tmp_path: Path) -> None:
    before = load_corpus(write_library(tmp_path)).validation.numel()
    (tmp_path / "aaa_first.py").write_bytes(TEXT)
    after = load_corpus(tmp_path)
    assert after.validation.numel() - before in (0, len(TEXT))


def test_training_text_is_capped(tmp_path: Path) -> None:
    assert load_corpus(write_library(tmp_path), most_training_bytes=300_000).training.numel() == 300_000


def test_a_library_without_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use a Python that ships its library as"):
        load_corpus(tmp_path)


def test_a_batch_depends_on_seed_step_and_rank_alone(tmp_path: Path) -> None:
    corpus = load_corpus(write_library(tmp_path))
    whole = corpus.training_batch(3, 1, 0, 1, batch_size=4, context_bytes=16)[0]
    halves = [corpus.training_batch(3, 1, rank, 2, batch_size=2, context_bytes=16)[0] for rank in range(2)]
    assert torch.equal(torch.cat(halves), whole)
    assert not torch.equal(corpus.training_batch(4, 1, 0, 1, 4, 16)[0], whole)
    assert not torch.equal(corpus.training_batch(3, 2, 0, 1, 4, 16)[0], whole)


def test_validation_windows_are_spread_and_do_not_overlap(tmp_path: Path) -> None:
    corpus = load_corpus(write_library(tmp_path))
    everything = corpus.validation_windows(10**9, 32)[0]
    assert everything.numel() == (corpus.validation.numel() - 1) // 32 * 32
    assert torch.equal(everything.flatten(), corpus.validation[: everything.numel()].long())
    some = corpus.validation_windows(320, 32)[0]
    starts = [(everything == window).all(dim=1).nonzero()[0].item() for window in some]
    assert len(some) == 10
    assert starts[0] == 0


@pytest.mark.parametrize("steps", [1, 2, 10, 137])
def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth(steps: int) -> None:
    fractions = [learning_rate_fraction(step, steps) for step in range(steps)]
    peak = fractions.index(max(fractions))
    assert max(fractions) == 1.0
    assert fractions[:peak] == sorted(fractions[:peak])
    assert fractions[peak:] == sorted(fractions[peak:], reverse=True)
    if steps > 1:
        assert fractions[-1] == pytest.approx(0.1)
