"""PowerSGD's three passes over a gradient, as loops that Numba compiles. Import it through `compiled`.

PyTorch's products each read a matrix of the gradient's size from memory and want M = g + e to lie in one. These loops
add g and e on the way, and while rows of the new residual lie in the cache they multiply them with the next step's
right factor, so that the next step begins by reading the gradient alone. In all 28 bytes an element are read and
written, against 36.

    project    left  = g right^T
    back       right = left (g + e)
    settle     mean = left^T right;  e = g + e - share mean;  g = mean;  ahead = e following^T

Shapes, everywhere: matrix (the gradient g) and residual (e): (rows, columns); left and ahead: (rank, rows); right and
following: (rank, columns). All are float32 NumPy arrays whose last dimension is contiguous; share is a float32. A
function's number is its rank, which is written out, since a loop over it would keep the compiler from working on
eight columns at a time.

`settle` decides what all ranks hold: its sum over the rank has the order of torch.mm's, k = 0, 1, …, and no rule of
arithmetic is bent. The sums of the other loops are all-reduced, or stay on the rank; they are added in any order.
"""

from typing import Any

import numpy

from tensorplay.compression.compiled import jit

__all__ = ["BACK", "PROJECT", "SETTLE"]

_LOOSE = {"reassoc", "contract", "nsz"}
#: A product and the sum it joins are rounded once, as in torch.mm. Of two products the one written first joins.
_FUSED = {"contract"}
_ZERO = numpy.float32(0.0)


@jit(fastmath=_LOOSE)
def _dot_1(row: Any, right: Any) -> Any:
    q0 = right[0]
    s0 = _ZERO
    for j in range(row.shape[0]):
        s0 += row[j] * q0[j]
    return s0


@jit(fastmath=_LOOSE)
def _dot_2(row: Any, right: Any) -> Any:
    q0, q1 = right[0], right[1]
    s0, s1 = _ZERO, _ZERO
    for j in range(row.shape[0]):
        s0 += row[j] * q0[j]
        s1 += row[j] * q1[j]
    return s0, s1


@jit(fastmath=_LOOSE)
def _dot_4(row: Any, right: Any) -> Any:
    q0, q1, q2, q3 = right[0], right[1], right[2], right[3]
    s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
    for j in range(row.shape[0]):
        s0 += row[j] * q0[j]
        s1 += row[j] * q1[j]
        s2 += row[j] * q2[j]
        s3 += row[j] * q3[j]
    return s0, s1, s2, s3


# Four rows at a time: they are read from memory side by side, and every value of the factor serves all of them.


@jit(fastmath=_LOOSE)
def _dots_1(matrix: Any, i: int, right: Any, out: Any) -> None:
    g, h, u, v = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
    q0 = right[0]
    a0, b0, c0, d0 = _ZERO, _ZERO, _ZERO, _ZERO
    for j in range(g.shape[0]):
        a0 += g[j] * q0[j]
        b0 += h[j] * q0[j]
        c0 += u[j] * q0[j]
        d0 += v[j] * q0[j]
    out[0, i], out[0, i + 1], out[0, i + 2], out[0, i + 3] = a0, b0, c0, d0


@jit(fastmath=_LOOSE)
def _dots_2(matrix: Any, i: int, right: Any, out: Any) -> None:
    g, h, u, v = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
    q0, q1 = right[0], right[1]
    a0, b0, c0, d0 = _ZERO, _ZERO, _ZERO, _ZERO
    a1, b1, c1, d1 = _ZERO, _ZERO, _ZERO, _ZERO
    for j in range(g.shape[0]):
        a0 += g[j] * q0[j]
        a1 += g[j] * q1[j]
        b0 += h[j] * q0[j]
        b1 += h[j] * q1[j]
        c0 += u[j] * q0[j]
        c1 += u[j] * q1[j]
        d0 += v[j] * q0[j]
        d1 += v[j] * q1[j]
    out[0, i], out[0, i + 1], out[0, i + 2], out[0, i + 3] = a0, b0, c0, d0
    out[1, i], out[1, i + 1], out[1, i + 2], out[1, i + 3] = a1, b1, c1, d1


@jit(fastmath=_LOOSE)
def _dots_4(matrix: Any, i: int, right: Any, out: Any) -> None:
    g, h, u, v = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
    q0, q1, q2, q3 = right[0], right[1], right[2], right[3]
    a0, b0, c0, d0 = _ZERO, _ZERO, _ZERO, _ZERO
    a1, b1, c1, d1 = _ZERO, _ZERO, _ZERO, _ZERO
    a2, b2, c2, d2 = _ZERO, _ZERO, _ZERO, _ZERO
    a3, b3, c3, d3 = _ZERO, _ZERO, _ZERO, _ZERO
    for j in range(g.shape[0]):
        a0 += g[j] * q0[j]
        a1 += g[j] * q1[j]
        a2 += g[j] * q2[j]
        a3 += g[j] * q3[j]
        b0 += h[j] * q0[j]
        b1 += h[j] * q1[j]
        b2 += h[j] * q2[j]
        b3 += h[j] * q3[j]
        c0 += u[j] * q0[j]
        c1 += u[j] * q1[j]
        c2 += u[j] * q2[j]
        c3 += u[j] * q3[j]
        d0 += v[j] * q0[j]
        d1 += v[j] * q1[j]
        d2 += v[j] * q2[j]
        d3 += v[j] * q3[j]
    out[0, i], out[0, i + 1], out[0, i + 2], out[0, i + 3] = a0, b0, c0, d0
    out[1, i], out[1, i + 1], out[1, i + 2], out[1, i + 3] = a1, b1, c1, d1
    out[2, i], out[2, i + 1], out[2, i + 2], out[2, i + 3] = a2, b2, c2, d2
    out[3, i], out[3, i + 1], out[3, i + 2], out[3, i + 3] = a3, b3, c3, d3


@jit
def _project_1(matrix: Any, right: Any, left: Any) -> None:
    rows = matrix.shape[0]
    whole = rows - rows % 4
    for i in range(0, whole, 4):
        _dots_1(matrix, i, right, left)
    for i in range(whole, rows):
        left[0, i] = _dot_1(matrix[i], right)


@jit
def _project_2(matrix: Any, right: Any, left: Any) -> None:
    rows = matrix.shape[0]
    whole = rows - rows % 4
    for i in range(0, whole, 4):
        _dots_2(matrix, i, right, left)
    for i in range(whole, rows):
        left[0, i], left[1, i] = _dot_2(matrix[i], right)


@jit
def _project_4(matrix: Any, right: Any, left: Any) -> None:
    rows = matrix.shape[0]
    whole = rows - rows % 4
    for i in range(0, whole, 4):
        _dots_4(matrix, i, right, left)
    for i in range(whole, rows):
        left[0, i], left[1, i], left[2, i], left[3, i] = _dot_4(matrix[i], right)


# Two rows at a time: the factor is read and written half as often.


@jit(fastmath=_LOOSE)
def _back_1(matrix: Any, residual: Any, left: Any, right: Any) -> None:
    rows, columns = matrix.shape
    q0 = right[0]
    whole = rows - rows % 2
    for i in range(0, whole, 2):
        g, e, h, f = matrix[i], residual[i], matrix[i + 1], residual[i + 1]
        a0, b0 = left[0, i], left[0, i + 1]
        for j in range(columns):
            q0[j] += a0 * (g[j] + e[j]) + b0 * (h[j] + f[j])
    for i in range(whole, rows):
        g, e = matrix[i], residual[i]
        a0 = left[0, i]
        for j in range(columns):
            q0[j] += a0 * (g[j] + e[j])


@jit(fastmath=_LOOSE)
def _back_2(matrix: Any, residual: Any, left: Any, right: Any) -> None:
    rows, columns = matrix.shape
    q0, q1 = right[0], right[1]
    whole = rows - rows % 2
    for i in range(0, whole, 2):
        g, e, h, f = matrix[i], residual[i], matrix[i + 1], residual[i + 1]
        a0, a1 = left[0, i], left[1, i]
        b0, b1 = left[0, i + 1], left[1, i + 1]
        for j in range(columns):
            v, w = g[j] + e[j], h[j] + f[j]
            q0[j] += a0 * v + b0 * w
            q1[j] += a1 * v + b1 * w
    for i in range(whole, rows):
        g, e = matrix[i], residual[i]
        a0, a1 = left[0, i], left[1, i]
        for j in range(columns):
            v = g[j] + e[j]
            q0[j] += a0 * v
            q1[j] += a1 * v


@jit(fastmath=_LOOSE)
def _back_4(matrix: Any, residual: Any, left: Any, right: Any) -> None:
    rows, columns = matrix.shape
    q0, q1, q2, q3 = right[0], right[1], right[2], right[3]
    whole = rows - rows % 2
    for i in range(0, whole, 2):
        g, e, h, f = matrix[i], residual[i], matrix[i + 1], residual[i + 1]
        a0, a1, a2, a3 = left[0, i], left[1, i], left[2, i], left[3, i]
        b0, b1, b2, b3 = left[0, i + 1], left[1, i + 1], left[2, i + 1], left[3, i + 1]
        for j in range(columns):
            v, w = g[j] + e[j], h[j] + f[j]
            q0[j] += a0 * v + b0 * w
            q1[j] += a1 * v + b1 * w
            q2[j] += a2 * v + b2 * w
            q3[j] += a3 * v + b3 * w
    for i in range(whole, rows):
        g, e = matrix[i], residual[i]
        a0, a1, a2, a3 = left[0, i], left[1, i], left[2, i], left[3, i]
        for j in range(columns):
            v = g[j] + e[j]
            q0[j] += a0 * v
            q1[j] += a1 * v
            q2[j] += a2 * v
            q3[j] += a3 * v


@jit(fastmath=_FUSED)
def _settle_row_1(g: Any, e: Any, left: Any, i: int, right: Any, share: Any) -> None:
    q0 = right[0]
    a0 = left[0, i]
    for j in range(g.shape[0]):
        mean = a0 * q0[j]
        e[j] = g[j] + e[j] - share * mean
        g[j] = mean


@jit(fastmath=_FUSED)
def _settle_row_2(g: Any, e: Any, left: Any, i: int, right: Any, share: Any) -> None:
    q0, q1 = right[0], right[1]
    a0, a1 = left[0, i], left[1, i]
    for j in range(g.shape[0]):
        mean = a1 * q1[j] + a0 * q0[j]
        e[j] = g[j] + e[j] - share * mean
        g[j] = mean


@jit(fastmath=_FUSED)
def _settle_row_4(g: Any, e: Any, left: Any, i: int, right: Any, share: Any) -> None:
    q0, q1, q2, q3 = right[0], right[1], right[2], right[3]
    a0, a1, a2, a3 = left[0, i], left[1, i], left[2, i], left[3, i]
    for j in range(g.shape[0]):
        mean = a3 * q3[j] + (a2 * q2[j] + (a1 * q1[j] + a0 * q0[j]))
        e[j] = g[j] + e[j] - share * mean
        g[j] = mean


@jit
def _settle_1(
    matrix: Any, residual: Any, left: Any, right: Any, share: Any, following: Any, ahead: Any
) -> None:
    rows = matrix.shape[0]
    whole = rows - rows % 4
    for i in range(rows):
        _settle_row_1(matrix[i], residual[i], left, i, right, share)
        if i % 4 == 3:
            _dots_1(residual, i - 3, following, ahead)
    for i in range(whole, rows):
        ahead[0, i] = _dot_1(residual[i], following)


@jit
def _settle_2(
    matrix: Any, residual: Any, left: Any, right: Any, share: Any, following: Any, ahead: Any
) -> None:
    rows = matrix.shape[0]
    whole = rows - rows % 4
    for i in range(rows):
        _settle_row_2(matrix[i], residual[i], left, i, right, share)
        if i % 4 == 3:
            _dots_2(residual, i - 3, following, ahead)
    for i in range(whole, rows):
        ahead[0, i], ahead[1, i] = _dot_2(residual[i], following)


@jit
def _settle_4(
    matrix: Any, residual: Any, left: Any, right: Any, share: Any, following: Any, ahead: Any
) -> None:
    rows = matrix.shape[0]
    whole = rows - rows % 4
    for i in range(rows):
        _settle_row_4(matrix[i], residual[i], left, i, right, share)
        if i % 4 == 3:
            _dots_4(residual, i - 3, following, ahead)
    for i in range(whole, rows):
        ahead[0, i], ahead[1, i], ahead[2, i], ahead[3, i] = _dot_4(residual[i], following)


PROJECT = {1: _project_1, 2: _project_2, 4: _project_4}
"""By rank: `(matrix, right, left)`."""
BACK = {1: _back_1, 2: _back_2, 4: _back_4}
"""By rank: `(matrix, residual, left, right)`; it adds to right."""
SETTLE = {1: _settle_1, 2: _settle_2, 4: _settle_4}
"""By rank: `(matrix, residual, left, right, share, following, ahead)`."""
