"""What is written when a low-rank exchange ends: the mean P Q^T to the bucket, what it leaves out to the residuals."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tensorplay.compression.error_feedback import Condition, write_where
from tensorplay.compression.low_rank_plan import Factorisation

__all__ = ["Settled"]


@dataclass
class Settled:
    """The verdict over an exchange.

        result = P Q^T;   residual = M - share P Q^T

    Args:
        share: ranks that take part in the mean over ranks of the group: each rank takes off its share of the result.
        finite: whether all sums were. keep: for each slice whether its step counts; if not, its residual stays, and the
            result is zero where nobody used it. Both are tensors where a device's value must not be waited for.
    """

    share: float
    finite: Condition
    keep: dict[int, Condition]

    def write(
        self,
        item: Factorisation,
        matrix: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        values: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
    ) -> None:
        """Write residuals and results of the members of a factorisation.

        Args:
            matrix: (batch, rows, columns), M. left: (batch, rank, rows), P^T. right: (batch, rank, columns), Q^T.
            values, residuals: of each member, (n,).
        """
        if not item.rows_each:
            self._write_flat(item, matrix, left, right, values, residuals)
            return
        for at, (own_values, residual) in enumerate(zip(values, residuals, strict=True)):
            keep = self.keep[item.members[at]]
            if keep is False:
                own_values.zero_()
            elif item.is_shared:
                rows = slice(at * item.rows_each, (at + 1) * item.rows_each)
                self._write_rows(matrix[0, rows], left[0, :, rows].t(), right[0], own_values, residual, keep)
            else:
                self._write_rows(matrix[at], left[at].t(), right[at], own_values, residual, keep)

    def _write_rows(
        self,
        matrix: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        values: torch.Tensor,
        residual: torch.Tensor | None,
        keep: Condition,
    ) -> None:
        """A member that is whole rows: matrix (rows, columns), left (rows, rank), right (rank, columns)."""
        if residual is not None:
            target = residual.view(matrix.shape)
            if matrix.data_ptr() == residual.data_ptr():
                matrix.addmm_(left, right, alpha=-self.share)
            elif keep is True:
                torch.addmm(matrix, left, right, alpha=-self.share, out=target)
            else:
                write_where(keep, torch.addmm(matrix, left, right, alpha=-self.share), target)
        out = values.view(matrix.shape) if values.dtype == torch.float32 else matrix
        torch.mm(left, right, out=out)
        self._finish(values, out.view(-1), keep)

    def _write_flat(
        self,
        item: Factorisation,
        matrix: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        values: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
    ) -> None:
        """Members that begin and end within a row: M goes to the residuals first, then its place takes the result."""
        flat = matrix.view(-1)
        parts = [flat[start : start + own.numel()] for start, own in zip(item.starts, values, strict=True)]
        keeps = [self.keep[index] for index in item.members]
        for part, residual, keep in zip(parts, residuals, keeps, strict=True):
            if residual is not None:
                write_where(keep, part, residual)
        torch.mm(left[0].t(), right[0], out=matrix[0])
        for part, own, residual, keep in zip(parts, values, residuals, keeps, strict=True):
            if isinstance(keep, torch.Tensor):
                if residual is not None:
                    write_where(keep, residual - part * self.share, residual)
            elif keep and residual is not None:
                residual.sub_(part, alpha=self.share)
            if keep is False:
                own.zero_()
            else:
                self._finish(own, part, keep)

    def _finish(self, values: torch.Tensor, result: torch.Tensor, keep: Condition) -> None:
        """Write a result to the bucket; without branches, zero where no rank used the parameter, NaN on overflow."""
        if isinstance(self.finite, torch.Tensor) and isinstance(keep, torch.Tensor):
            result = torch.where(keep, result, torch.where(self.finite, 0.0, float("nan")))
        if result.data_ptr() != values.data_ptr():
            values.copy_(result)
