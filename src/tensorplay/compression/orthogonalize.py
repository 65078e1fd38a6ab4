"""Orthonormal rows for batches of wide matrices: the only place where PowerSGD could divide by zero, so it doesn't.

On CPU it is Householder QR, which has no case where it fails: zero, rank-deficient, tiny and huge matrices all give
rows that are orthonormal to rounding. On a device, where QR of long thin matrices is slow, it is Cholesky-QR on a
float64 Gram matrix with a small ridge.
"""

import torch

__all__ = ["cholesky_orthogonalize_", "orthogonalize_", "qr_orthogonalize_"]

_RIDGE_FRACTION = 1e-12


def orthogonalize_(rows: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """Replace the rows of each matrix by orthonormal ones that span the same space, in place.

        rows = R^T Z  (R upper triangular, Z orthonormal);   rows <- diag(|R_jj| / (|R_jj| + epsilon)) Z

    Args:
        rows: (batch, r, n) float32 or float64, r <= n, contiguous. A column of the factor is a row here: contiguous.
        epsilon: >= 0; damps rows whose own part is not much longer than `epsilon`. 0: no damping.
    Returns: `rows`.
    Raises: ValueError: another shape, r > n, or a negative epsilon.
    Example:
        >>> rows = orthogonalize_(torch.tensor([[[3.0, 0.0], [3.0, 4.0]]]))
        >>> rows.abs()
        tensor([[[1., 0.],
                 [0., 1.]]])
        >>> bool(orthogonalize_(torch.zeros(1, 2, 5)).isfinite().all())
        True

    Paper: Vogels et al. 2019, PowerSGD, algorithm 1 (there Gram-Schmidt).

    Differs: torch adds `epsilon` inside Gram-Schmidt for rank 1 and 2 and ignores it above; here it means the same at
        every rank. It is never needed: a zero matrix is safe without it.
    """
    if rows.dim() != 3 or rows.shape[1] > rows.shape[2]:
        raise ValueError(f"rows must be (batch, r, n) with r <= n, got {tuple(rows.shape)}")
    if epsilon < 0:
        raise ValueError(f"epsilon must be >= 0, got {epsilon}")
    if rows.numel() == 0:
        return rows
    return (
        qr_orthogonalize_(rows, epsilon)
        if rows.device.type == "cpu"
        else cholesky_orthogonalize_(rows, epsilon)
    )


def qr_orthogonalize_(rows: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """`orthogonalize_` by one batched Householder QR; a zero row gets some direction orthogonal to the others."""
    unit, upper = torch.linalg.qr(rows.mT)
    if epsilon:
        length = upper.diagonal(dim1=-2, dim2=-1).abs()
        unit = unit * (length / (length + epsilon)).unsqueeze(-2)
    return rows.copy_(unit.mT)


def cholesky_orthogonalize_(rows: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """`orthogonalize_` by Cholesky-QR; a row that depends on the others becomes (nearly) zero. Not yet run on a GPU.

    1. Scale each matrix to a largest entry of 1 and go to float64, whose range and precision the squares need.
    2. Gram matrix, with a ridge of 1e-12 of its trace, so that it can always be factored.
    3. Solve with its Cholesky factor.
    """
    largest = rows.abs().amax(dim=(-2, -1), keepdim=True).double()
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    wide = rows.double() / largest
    gram = wide @ wide.mT
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(diagonal.sum(-1, keepdim=True) * _RIDGE_FRACTION + torch.finfo(torch.float64).tiny)
    lower, _ = torch.linalg.cholesky_ex(gram)
    unit = torch.linalg.solve_triangular(lower, wide, upper=False)
    if epsilon:
        length = lower.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * largest
        unit = unit * (length / (length + epsilon))
    return rows.copy_(unit)
