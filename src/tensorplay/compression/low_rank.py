"""PowerSGD: one step of subspace iteration on the mean gradient, without ever forming it.

    M_i = g_i + e_i                        gradient of rank i and what it has not sent yet
    P   = orthonormal(sum_i M_i Q / d)     first round; Q: the last step's right factor
    Q   = sum_i M_i^T P / d                second round
    result = P Q^T                         the projection of the mean of all M_i
    e_i = M_i - (d / W) result             d: ranks that take part, W: ranks of the group

All ranks subtract the same, so sum_i (g_i + e_i) before = d x result + sum_i e_i after, exactly. Factors are kept
transposed, their long side contiguous: that is up to twenty times faster on CPU than the textbook's layout. With Numba,
float32 gradients are worked on by compiled loops, see `low_rank_fused`.

Paper: Vogels, Karimireddy, Jaggi 2019, PowerSGD, algorithms 1 and 2.
"""

import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from tensorplay.compression.agreement import require_equal, tell_all
from tensorplay.compression.bucket import Bucket
from tensorplay.compression.codec import all_finite
from tensorplay.compression.error_feedback import Condition
from tensorplay.compression.low_rank_factors import (
    draw_factor,
    is_bounded,
    load_right,
    multiply,
    multiply_transposed,
    orthogonalize_factors,
    store_right,
)
from tensorplay.compression.low_rank_fused import (
    AHEAD,
    FusedMatrices,
    fits,
    fused_loops,
    require_one_rounding,
    rounding_code,
)
from tensorplay.compression.low_rank_plan import Factorisation, LowRankPlan
from tensorplay.compression.low_rank_result import Settled
from tensorplay.compression.memory import Tensors
from tensorplay.compression.rounds import AllReduce, Exchange, Round, Scratch

__all__ = ["LowRankTerms", "check_ranks", "low_rank_mean", "plain_mean"]

_HALF_LIMIT = 65000.0


@dataclass(frozen=True)
class LowRankTerms:
    """What one exchange needs to know besides its plan.

    Args:
        rank, world_size: in the group. divisor: ranks that take part in the mean.
        used: for each slice of the bucket, whether this rank used it. step, seed: equal on all ranks.
        epsilon: see `orthogonalize_`. warm_start: begin from the last right factor.
        wire_dtype: float16 or bfloat16 on the wire, None: float32 factors and the bucket's own dtype.
        check: compare with the other ranks first, and give all of them one right factor.
        branch_free: never wait for a device's value; None: on devices.
    """

    rank: int
    world_size: int
    divisor: int
    used: Sequence[bool]
    step: int
    seed: int
    epsilon: float = 0.0
    warm_start: bool = True
    wire_dtype: torch.dtype | None = None
    check: bool = False
    branch_free: bool | None = None


def low_rank_mean(
    bucket: Bucket, plan: LowRankPlan, memories: Sequence[Tensors], terms: LowRankTerms, scratch: Scratch
) -> Exchange:
    """Average a bucket through its factors, in place; two rounds, one where nothing is factorised.

    Args:
        memories: of every slice: "residual" (n,) float32 where there is error feedback, "q" (rank, columns) float32,
            the right factor the next step starts from, and "ahead", see `low_rank_fused`. A result that isn't finite
            changes none of them.
    Wire: 2 (W-1)/W x 4 x (r x sum(rows + columns) + uncompressed elements + one flag a factorised parameter) bytes.
    Raises: RuntimeError: `terms.check`, and the ranks are not at one step of one configuration.
    """
    return _LowRank(bucket, plan, memories, terms, scratch).rounds()


def plain_mean(
    values: torch.Tensor, divisor: int, wire_dtype: torch.dtype | None, scratch: Scratch
) -> Exchange:
    """Average a contiguous vector in place, by one all-reduce in `wire_dtype` (None: its own)."""
    values.mul_(1.0 / divisor)
    if wire_dtype is None or wire_dtype == values.dtype:
        yield AllReduce([values])
        return
    sent = scratch.borrow("low_rank/plain", values.numel(), wire_dtype, values.device)
    sent.copy_(values)
    yield AllReduce([sent])
    values.copy_(sent)


def check_ranks(
    facts: tuple[int, int, int, int, int, int], rank: int, world_size: int, device: torch.device
) -> Generator[Round, None, int | None]:
    """Compare with the other ranks, before an exchange whose sizes depend on it. One round of 48 bytes a peer.

    Args:
        facts: step, seed, elements, fingerprint of the plan (0: no plan yet), crc of the kept right factors (0: none),
            see `rounding_code`.
    Returns: the rank whose right factors all should take, None where they are equal.
    Raises: RuntimeError: step, seed, elements or plan differ, or only some ranks have Numba and products differ; the
        same text on all ranks.
    """
    told = yield from tell_all(facts, rank, world_size, device)
    require_equal(
        ["step", "random_seed", "elements in the bucket", "layout (rank, min_compression_rate, model)"],
        [theirs[:4] for theirs in told],
        "make the state alike on all ranks, and load one checkpoint on all of them or on none",
    )
    require_one_rounding([theirs[5] for theirs in told])
    factors = [theirs[4] for theirs in told]
    if len(set(factors)) == 1:
        return None
    return next(peer for peer, crc in enumerate(factors) if crc)


class _LowRank:
    """One exchange of one bucket. Its rounds:

    1. At the first step, compare step, seed and plan with the other ranks; on a device this waits for the answer.
    2. Right factors from memory, orthonormal. Left factors, their flags and what travels uncompressed: all-reduce.
       Where a float32 gradient lies in the bucket as a matrix, g Q and e Q are summed and M = g + e is not made yet.
    3. If all was finite, M is made, in the residual's memory. Left factors orthonormal. Right factors: all-reduce.
    4. Residuals, right factors and result are written, if all was finite; otherwise only the result: NaN.

    Compiled loops (`FusedMatrices`) never make M: they touch the residual in 4 alone.
    """

    def __init__(
        self,
        bucket: Bucket,
        plan: LowRankPlan,
        memories: Sequence[Tensors],
        terms: LowRankTerms,
        scratch: Scratch,
    ) -> None:
        self.bucket, self.plan, self.memories, self.terms, self.scratch = (
            bucket,
            plan,
            memories,
            terms,
            scratch,
        )
        self.device = bucket.buffer.device
        self.branch_free = self.device.type != "cpu" if terms.branch_free is None else terms.branch_free
        self.right = self.borrow("right", plan.right_elements)
        self.loops = None if self.branch_free else fused_loops(self.right)
        self.values = [entry.values for entry in bucket.slices]
        self.first = self.borrow("first", plan.left_elements + len(plan.members) + plan.plain_elements)
        self.left = self.first[: plan.left_elements]
        self.flags = self.first[plan.left_elements : plan.left_elements + len(plan.members)]
        half = terms.wire_dtype is not None
        own = bucket.buffer.dtype
        #: What travels uncompressed does so in float32's range; float16 has not got it.
        self.plain_dtype = torch.bfloat16 if half and own.itemsize > 2 else own
        self.first_dtype = torch.bfloat16 if half else torch.float32
        self.right_dtype = terms.wire_dtype or torch.float32
        self.plain = self.first[plan.left_elements + len(plan.members) :]
        self.together = self.plain_dtype == self.first_dtype  # one tensor on the wire
        if not self.together:
            self.plain = self.borrow("tail", plan.plain_elements, self.plain_dtype)
        self.matrices: list[torch.Tensor | FusedMatrices] = []
        #: Factorisation -> gradient, where the matrix is the residual's memory and the gradient not yet added.
        self.apart: dict[int, torch.Tensor] = {}
        self.keep: dict[int, Condition] = {}

    def borrow(self, name: str, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.scratch.borrow(f"low_rank/{name}", numel, dtype, self.device)

    def rounds(self) -> Exchange:
        """See the class."""
        plan = self.plan
        source: int | None = None
        if self.terms.check:
            terms, plan = self.terms, self.plan
            rounding = rounding_code(self.loops, plan)
            facts = (terms.step, terms.seed, plan.elements, plan.fingerprint, self._factors_crc(), rounding)
            source = yield from check_ranks(facts, terms.rank, terms.world_size, self.device)
        self._load_matrices()
        load_right(plan, self.memories, self.right, self._draw, self.terms.warm_start)
        if source is not None:
            if source != self.terms.rank:
                self.right.zero_()
            yield AllReduce([self.right])  # a sum of one rank's factor and zeros: a broadcast
        orthogonalize_factors(
            self.right, plan.right_classes, self.terms.epsilon, self.branch_free, revive=True
        )

        self._make_first(self.terms.warm_start and source is None)
        yield from self._sum_first()
        good = all_finite(self.plain) & is_bounded(self.left)
        finite = self._condition(good)
        if finite is False:
            self.bucket.buffer.fill_(float("nan"))
            return False
        self._store_plain(finite)
        if not plan.factorisations:
            return finite
        self._decide(finite)

        scales = self._scales() if self.right_dtype == torch.float16 else None
        orthogonalize_factors(self.left, plan.left_classes, self.terms.epsilon, self.branch_free)
        for item, matrix in zip(plan.factorisations, self.matrices, strict=True):
            if isinstance(matrix, FusedMatrices):
                matrix.back()
            else:
                multiply(item.left(self.left), matrix, item.right(self.right))
        self.right.mul_(1.0 / self.terms.divisor)
        yield from self._sum_right(scales)
        good = good & is_bounded(self.right)
        finite = self._condition(good)
        if finite is False:
            self._undo()
            self.bucket.buffer.fill_(float("nan"))
            return False
        self._settle(finite)
        return finite

    # The first step -------------------------------------------------------------------------------------------

    def _factors_crc(self) -> int:
        """Names the right factors kept from before; 0: there are none."""
        crc = 0
        if self.terms.warm_start:
            for index in self.plan.members:
                held = self.memories[index].get("q")
                if held is not None:
                    crc = zlib.crc32(held.cpu().numpy().tobytes(), crc) or 1
        return crc

    # Before the rounds ----------------------------------------------------------------------------------------

    def _load_matrices(self) -> None:
        by_loops = [fits(self.loops, item, self.values, self.memories) for item in self.plan.factorisations]
        gathered = [
            item.numel
            for item, is_fused in zip(self.plan.factorisations, by_loops, strict=True)
            if not is_fused and not self._in_place(item)
        ]
        scratch = self.borrow("matrices", sum(gathered))
        at = 0
        for number, item in enumerate(self.plan.factorisations):
            shape = (item.batch, item.rows, item.columns)
            if by_loops[number]:
                factors = (item.left(self.left), item.right(self.right))
                fused = FusedMatrices(self.loops, item, self.values, self.memories, factors)
                self.matrices.append(fused)
                continue
            if self._in_place(item):
                index = item.members[0]
                matrix = self.bucket.slices[index].values.view(shape)
                residual = self.memories[index].get("residual")
                if residual is not None and self.branch_free:
                    matrix.add_(residual.view(shape))
                elif residual is not None:
                    self.apart[number] = matrix
                    matrix = residual.view(shape)
            else:
                flat = scratch[at : at + item.numel]
                at += item.numel
                self._gather(item, flat)
                matrix = flat.view(shape)
            self.matrices.append(matrix)

    def _in_place(self, item: Factorisation) -> bool:
        """Whether the matrix is the bucket's own memory."""
        values = self.bucket.slices[item.members[0]].values
        return len(item.members) == 1 and values.dtype == torch.float32 and values.numel() == item.numel

    def _gather(self, item: Factorisation, flat: torch.Tensor) -> None:
        """Write g + e of all members behind each other, zeros after them."""
        end = 0
        for index, start in zip(item.members, item.starts, strict=True):
            values, residual = self.bucket.slices[index].values, self.memories[index].get("residual")
            end = start + values.numel()
            if residual is not None and values.dtype == torch.float32:
                torch.add(values, residual, out=flat[start:end])
            else:
                flat[start:end].copy_(values)
                if residual is not None:
                    flat[start:end].add_(residual)
        flat[end:].zero_()

    def _draw(self, number: int, shape: tuple[int, int]) -> torch.Tensor:
        return draw_factor(self.terms.seed, self.terms.step, (self.bucket.index, number), shape)

    # First round ----------------------------------------------------------------------------------------------

    def _make_first(self, is_own: bool) -> None:
        factor = 1.0 / self.terms.divisor
        for number, (item, matrix) in enumerate(zip(self.plan.factorisations, self.matrices, strict=True)):
            if isinstance(matrix, FusedMatrices):
                matrix.project(is_own)
                continue
            left, right = item.left(self.left), item.right(self.right)
            if item.batch > 1:
                torch.bmm(right, matrix.mT, out=left)
            else:
                multiply_transposed(right[0], matrix[0], left[0])
            if number in self.apart:
                multiply_transposed(right[0], self.apart[number][0], left[0], add=True)
        self.left.mul_(factor)
        if self.plan.members:
            used = [float(self.terms.used[index]) for index in self.plan.members]
            self.flags.copy_(torch.tensor(used))
        if self.plan.plain:
            torch.cat([self.bucket.slices[index].values for index in self.plan.plain], out=self.plain)
            self.plain.mul_(factor)

    def _sum_first(self) -> Exchange:
        first = self.first if self.together else self.first[: self.left.numel() + self.flags.numel()]
        sent = first
        if self.first_dtype != torch.float32:
            sent = self.borrow("first/sent", first.numel(), self.first_dtype)
            sent.copy_(first)
        yield AllReduce([sent] if self.together else [sent, self.plain])
        if sent is not first:
            first.copy_(sent)

    def _store_plain(self, finite: Condition) -> None:
        at = 0
        for index in self.plan.plain:
            values = self.bucket.slices[index].values
            mean = self.plain[at : at + values.numel()]
            at += values.numel()
            if isinstance(finite, torch.Tensor):
                mean = torch.where(finite, mean, float("nan"))
            values.copy_(mean)

    # Second round ---------------------------------------------------------------------------------------------

    def _scales(self) -> list[torch.Tensor]:
        """Powers of two that bring right factors into float16's range; from the left sums, so equal on all ranks.

        The left sum is M Q for orthonormal Q, and the right factor to come is not smaller: |M^T P| >= |P^T M Q|.
        """
        scales = []
        for item in self.plan.factorisations:
            largest = item.left(self.left).abs().amax(dim=(-2, -1), keepdim=True)
            exponent = torch.frexp(largest).exponent.clamp(-100, 100)
            scales.append(torch.ldexp(torch.ones_like(largest), -exponent))
        return scales

    def _sum_right(self, scales: list[torch.Tensor] | None) -> Exchange:
        if self.right_dtype == torch.float32:
            yield AllReduce([self.right])
            return
        if scales is not None:
            # What is cut off here is large only where the ranks' gradients cancel; it stays in the residuals.
            limit = _HALF_LIMIT / self.terms.world_size
            for item, scale in zip(self.plan.factorisations, scales, strict=True):
                item.right(self.right).mul_(scale).clamp_(-limit, limit)
        sent = self.borrow("right/sent", self.right.numel(), self.right_dtype)
        sent.copy_(self.right)
        yield AllReduce([sent])
        self.right.copy_(sent)
        if scales is not None:
            for item, scale in zip(self.plan.factorisations, scales, strict=True):
                item.right(self.right).div_(scale)

    # After the rounds -----------------------------------------------------------------------------------------

    def _condition(self, good: torch.Tensor) -> Condition:
        return good if self.branch_free else bool(good)

    def _decide(self, finite: Condition) -> None:
        """Which parameters' steps count: those that some rank used. Their gradients join the residuals now."""
        members = self.plan.members
        if isinstance(finite, torch.Tensor):
            self.keep = {index: finite & (self.flags[at] > 0) for at, index in enumerate(members)}
            return
        counts = self.flags.tolist()
        self.keep = {index: counts[at] > 0 for at, index in enumerate(members)}
        for residual, gradient in self._kept_apart():
            residual.add_(gradient)

    def _undo(self) -> None:
        """Take the gradients out of the residuals again, to rounding; only for values near the end of float32."""
        for residual, gradient in self._kept_apart():
            residual.sub_(gradient)

    def _kept_apart(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, gradient in self.apart.items():
            residual = self.matrices[number]
            is_kept = self.keep[self.plan.factorisations[number].members[0]]
            if is_kept and isinstance(residual, torch.Tensor):
                yield residual, gradient

    def _settle(self, finite: Condition) -> None:
        settled = Settled(self.terms.divisor / self.terms.world_size, finite, self.keep)
        if isinstance(finite, torch.Tensor):
            settled.keep = {index: finite & condition for index, condition in self.keep.items()}
        following = self._following()
        for item, matrix in zip(self.plan.factorisations, self.matrices, strict=True):
            left, right = item.left(self.left), item.right(self.right)
            if isinstance(matrix, FusedMatrices):
                matrix.settle(item.right(following), settled.share, settled.keep)
            else:
                values = [self.values[index] for index in item.members]
                residuals = [self.memories[index].get("residual") for index in item.members]
                settled.write(item, matrix, left, right, values, residuals)
                for index in item.members:
                    self.memories[index].pop(AHEAD, None)
            if self.terms.warm_start:
                store_right(item, self.memories, right, settled.keep)

    def _following(self) -> torch.Tensor:
        """The right factors as the next step will begin with them; it makes them again from what is kept."""
        is_needed = any(isinstance(matrix, FusedMatrices) for matrix in self.matrices)
        if not self.terms.warm_start or not is_needed:
            return self.right
        following = self.borrow("following", self.right.numel()).copy_(self.right)
        classes, epsilon = self.plan.right_classes, self.terms.epsilon
        orthogonalize_factors(following, classes, epsilon, self.branch_free, revive=True)
        return following
