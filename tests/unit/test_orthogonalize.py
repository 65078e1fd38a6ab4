"""Orthonormal rows in every case that occurs: both methods, checked by the rows themselves."""

from collections.abc import Callable

import pytest
import torch

from tensorplay.compression.orthogonalize import (
    cholesky_orthogonalize_,
    orthogonalize_,
    qr_orthogonalize_,
)

Method = Callable[..., torch.Tensor]
METHODS = pytest.mark.parametrize("method", [qr_orthogonalize_, cholesky_orthogonalize_])


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def projector(matrix: torch.Tensor) -> torch.Tensor:
    wide = matrix.double()
    return wide.mT @ wide


@METHODS
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 50), (2, 4, 4), (5, 4, 300), (2, 8, 1000)])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e18])
def test_rows_are_orthonormal_and_span_the_same(method: Method, shape: tuple[int, ...], scale: float) -> None:
    before = rows(*shape) * scale
    after = method(before.clone())
    identity = torch.eye(shape[1]).expand(shape[0], -1, -1)
    torch.testing.assert_close(after @ after.mT, identity, rtol=0, atol=1e-5)
    wide = before.double() / scale
    torch.testing.assert_close(wide @ projector(after), wide, rtol=1e-4, atol=1e-4)


@METHODS
def test_ill_conditioned_rows_keep_what_matters(method: Method) -> None:
    base = rows(1, 1, 200)
    near = torch.cat([base, base + 1e-6 * rows(1, 1, 200, seed=1)], dim=1)
    after = method(near.clone())
    torch.testing.assert_close(near.double() @ projector(after), near.double(), rtol=1e-4, atol=1e-5)
    lengths = torch.linalg.vector_norm(after, dim=-1)
    if method is qr_orthogonalize_:
        torch.testing.assert_close(lengths, torch.ones(1, 2))
    else:  # the ridge shortens a row that is 1e-6 off another one
        assert 0.3 < float(lengths[0, 1]) < 1
    assert float((after @ after.mT)[0, 0, 1].abs()) < 1e-3


@METHODS
def test_what_depends_on_other_rows_stays_finite(method: Method) -> None:
    base = rows(1, 1, 60)
    for bad in (
        torch.zeros(2, 3, 60),
        torch.cat([base, base, 2 * base], dim=1),
        torch.cat([base, torch.zeros(1, 2, 60)], dim=1),
        torch.cat([torch.zeros(1, 1, 60), base], dim=1),
        torch.full((1, 2, 60), 1e-42),
    ):
        after = method(bad.clone())
        assert torch.isfinite(after).all()
        assert float((after @ after.mT).abs().max()) < 1 + 1e-4
        torch.testing.assert_close(bad.double() @ projector(after), bad.double(), rtol=1e-4, atol=1e-4)


def test_qr_is_orthonormal_even_for_zero() -> None:
    after = qr_orthogonalize_(torch.zeros(1, 3, 9))
    torch.testing.assert_close(after @ after.mT, torch.eye(3).unsqueeze(0))


@METHODS
def test_epsilon_damps_short_rows(method: Method) -> None:
    # one row of length 3: 3 / (3 + 1); one of length 0: nothing is left
    damped = method(torch.tensor([[[3.0, 0.0], [0.0, 0.0]]]), 1.0)
    torch.testing.assert_close(damped.abs(), torch.tensor([[[0.75, 0.0], [0.0, 0.0]]]))


def test_both_methods_span_the_same() -> None:
    one, other = (method(rows(4, 3, 90)) for method in (qr_orthogonalize_, cholesky_orthogonalize_))
    torch.testing.assert_close(projector(one), projector(other), rtol=0, atol=1e-5)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"r <= n, got \(1, 3, 2\)"):
        orthogonalize_(torch.zeros(1, 3, 2))
    with pytest.raises(ValueError, match="epsilon must be >= 0, got -1"):
        orthogonalize_(torch.zeros(1, 1, 2), -1)
    assert orthogonalize_(torch.zeros(0, 1, 2)).numel() == 0
