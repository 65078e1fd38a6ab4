"""Some entries of a gradient, the others left for later: the largest, or random ones.

Both need error feedback: what is not sent is otherwise lost.
"""

import numpy
import torch

from tensorplay.compression.codec import Codec, Context

__all__ = ["RandomK", "TopK"]

_SAMPLE = 1 << 14  # values from which the threshold is guessed
_BAND = 64  # neighbours whose largest and smallest value are compared with the threshold first
_PAGE = 1 << 16  # entries that a 16-bit index can tell apart
_FULLEST = (
    0.02  # above this fraction nearly every band holds a survivor, and looking at bands first is in vain
)


class _Sparse(Codec):
    """What both share: a fixed number of entries a call, and how a non-finite value that isn't sent is still told."""

    whole_blocks = True

    def __init__(self, fraction: float = 0.01) -> None:
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise TypeError(f"fraction must be a number, got {fraction!r}")
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"fraction must be above 0 and at most 1, got {fraction}")
        self.fraction = float(fraction)

    def entries(self, numel: int) -> int:
        """How many of `numel` values are sent: max(1, floor(fraction * numel)); none of none."""
        return min(numel, max(1, int(self.fraction * numel)))

    def is_finite(self, payload: torch.Tensor, numel: int, context: Context) -> torch.Tensor:
        """Whether every entry that was sent is finite; one that wasn't has made all of them NaN."""
        return torch.isfinite(payload[: 4 * self.entries(numel)].view(torch.float32)).all()

    def decode(self, payload: torch.Tensor, out: torch.Tensor, context: Context) -> None:
        """Write the entries to their places in `out`, zeros elsewhere."""
        out.zero_()
        if out.numel():
            entries = payload[: 4 * self.entries(out.numel())].view(torch.float32)
            out.index_copy_(0, self._indices(payload, out, context), entries.to(out.dtype))

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context) -> None:
        """Add factor * entry to the places of the entries alone."""
        if out.numel():
            entries = payload[: 4 * self.entries(out.numel())].view(torch.float32)
            out.index_add_(0, self._indices(payload, out, context), entries.to(out.dtype), alpha=factor)

    def _indices(self, payload: torch.Tensor, out: torch.Tensor, context: Context) -> torch.Tensor:
        """Where the entries belong: int64 (entries,), all different."""
        raise NotImplementedError


class TopK(_Sparse):
    """Keep the k values of largest magnitude.

        k = max(1, floor(fraction * n));   payload = (values, indices) of the k largest |value|

    Always exactly k, and exactly the k largest: a threshold is guessed from a sample of 16,384 values, the k largest
    are taken from whatever reaches it, and where the guess was too high everything is looked at.

    Args:
        fraction: share of entries sent, in (0, 1]; smaller compresses more.
    Shapes: values (n,) float32; payload: k float32, then k indices of 16 bits (after one count for every 65,536 values
        where there are more than that), or of 32 bits where those are fewer bytes.
    Wire: about 6 bytes an entry; gathered, so world_size - 1 times that is received.
    Raises: ValueError: fraction outside (0, 1].
    Example:
        >>> codec = TopK(0.5)
        >>> codec.decompress(codec.compress(torch.tensor([1.0, -4.0, 3.0, 0.5])), 4)
        tensor([ 0., -4.,  3.,  0.])

    Paper: Lin et al. 2018 ("Deep Gradient Compression"), section 3. Differs: no momentum correction; exact selection
        after a sampled threshold, in blocks.
    """

    def __init__(self, fraction: float = 0.01) -> None:
        super().__init__(fraction)
        self.name = f"topk:{fraction:g}"

    def wire_bytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` values."""
        entries = self.entries(numel)
        return 4 * entries + min(4 * entries, 2 * entries + 4 * _pages(numel))

    def encode(self, values: torch.Tensor, payload: torch.Tensor, context: Context) -> None:
        """Write the payload of `values`.

        1. Choose k indices, in rising order. 2. Write their values, all NaN if any value isn't finite: comparisons
        with NaN are false, so one would not be chosen. 3. Write the indices.
        """
        numel = values.numel()
        if not numel:
            return
        count = self.entries(numel)
        if values.device.type == "cpu":
            chosen, extremes = _largest_on_cpu(values, count, context)
        else:
            chosen, extremes = _largest_anywhere(values, count)
        entries = payload[: 4 * count].view(torch.float32)
        torch.index_select(values, 0, chosen, out=entries)
        entries.add_((extremes * 0.0).sum())
        _write_indices(chosen, numel, payload[4 * count :])

    def _indices(self, payload: torch.Tensor, out: torch.Tensor, context: Context) -> torch.Tensor:
        count = self.entries(out.numel())
        return _read_indices(payload[4 * count :], count, out.numel())


class RandomK(_Sparse):
    """Send random entries, the same places on every rank, so that ranks can add them and no index is sent.

        k = max(1, floor(fraction * n));   payload = value[i_1], ..., value[i_k]

    The block is cut into k stretches of n / k values, one place is drawn from each, and all are shifted by one random
    number (modulo n), so every place is equally likely. Places follow from the seed of step and block; no generator
    of the user's is touched.

    Values are sent as they are, not times n / k: with error feedback, which this codec needs, that is what keeps the
    residual from growing. Without it the result is k / n of the gradient on average.

    Args:
        fraction: share of entries sent, in (0, 1].
    Shapes: values (n,) float32; payload k float32.
    Wire: 4 bytes an entry.
    Raises: ValueError: fraction outside (0, 1].
    Example:
        >>> codec = RandomK(0.5)
        >>> int(codec.decompress(codec.compress(torch.ones(8)), 8).sum())
        4

    Paper: Stich et al. 2018 ("Sparsified SGD with Memory"), section 2; Wangni et al. 2018. Differs: one place
        a stretch.
    """

    sums_as = torch.float32

    def __init__(self, fraction: float = 0.01) -> None:
        super().__init__(fraction)
        self.name = f"randomk:{fraction:g}"

    def wire_bytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` values."""
        return 4 * self.entries(numel)

    def encode(self, values: torch.Tensor, payload: torch.Tensor, context: Context) -> None:
        """Write the values at the places of this seed; all NaN if any value isn't finite, sent or not."""
        if not values.numel():
            return
        entries = payload.view(torch.float32)
        torch.index_select(values, 0, self._indices(payload, values, context), out=entries)
        entries.add_(values.amax() * 0.0 + values.amin() * 0.0)

    def _indices(self, payload: torch.Tensor, out: torch.Tensor, context: Context) -> torch.Tensor:
        numel, count = out.numel(), self.entries(out.numel())
        generator = torch.Generator(out.device)
        generator.manual_seed(context.seed & (2**63 - 1))
        draws = torch.rand(count + 1, generator=generator, device=out.device, dtype=torch.float64)
        borders = torch.arange(count + 1, device=out.device) * numel // count
        widths = borders[1:] - borders[:-1]
        shift = (draws[count] * numel).long()
        return (borders[:-1] + (draws[:count] * widths).long() + shift) % numel


def _largest_on_cpu(values: torch.Tensor, count: int, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the `count` values of largest magnitude in rising order, and the largest and smallest value of all.

    1. Guess a threshold that a few more than `count` values reach.
    2. Where few values reach it, find the bands of 64 that hold one; look at single values only there.
    3. Of the survivors take the largest; where there are too few, choose from all.
    """
    numel = values.numel()
    array = values.numpy()
    threshold = _guess_threshold(array, count)
    survivors: numpy.ndarray
    if count <= _FULLEST * numel:
        bands = numel // _BAND
        high, low = context.scratch.borrow("topk/bands", 2 * bands, torch.float32, values.device).view(2, -1)
        table = values[: bands * _BAND].view(bands, _BAND)
        torch.amax(table, 1, out=high)
        torch.amin(table, 1, out=low)
        rest = values[bands * _BAND :]
        extremes = torch.stack(
            [part.amax() for part in (high, rest) if part.numel()]
            + [part.amin() for part in (low, rest) if part.numel()]
        )
        full = numpy.flatnonzero((high.numpy() >= threshold) | (low.numpy() <= -threshold))
        inside = numpy.abs(table.numpy()[full]).reshape(-1)
        survivors = numpy.flatnonzero(inside >= threshold)
        survivors = full[survivors // _BAND] * _BAND + survivors % _BAND
        tail = numpy.flatnonzero(numpy.abs(rest.numpy()) >= threshold) + bands * _BAND
        survivors = numpy.concatenate([survivors, tail])
    else:
        extremes = torch.stack([values.amax(), values.amin()])
        magnitudes = context.scratch.borrow("topk/magnitudes", numel, torch.float32, values.device)
        torch.abs(values, out=magnitudes)
        survivors = numpy.flatnonzero(magnitudes.numpy() >= threshold)
    if len(survivors) < count:
        return _largest_anywhere(values, count)
    magnitudes_left = numpy.abs(array[survivors])
    border = numpy.partition(magnitudes_left, len(survivors) - count)[len(survivors) - count]
    keep = magnitudes_left > border
    ties = numpy.flatnonzero(magnitudes_left == border)
    keep[ties[: count - numpy.count_nonzero(keep)]] = True
    return torch.from_numpy(survivors[keep]), extremes


def _largest_anywhere(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on any device, one look at everything; which of equal values at the border is left to torch."""
    chosen = torch.topk(values.abs(), count, sorted=False).indices.sort().values
    return chosen, torch.stack([values.amax(), values.amin()])


def _guess_threshold(array: numpy.ndarray, count: int) -> float:
    """A magnitude that a few more than `count` entries of `array` are expected to reach."""
    step = (
        max(1, len(array) // _SAMPLE) | 1
    )  # odd: even lengths of rows are not met at the same column each time
    sample = numpy.abs(array[::step])
    expected = count * len(sample) / len(array)
    wanted = int(expected + 3.0 * expected**0.5) + 2  # three standard deviations more
    if wanted >= len(sample):
        return 0.0
    return float(numpy.partition(sample, len(sample) - wanted)[len(sample) - wanted])


def _pages(numel: int) -> int:
    """How many counts 16-bit indices need: none where all lie within one page."""
    return 0 if numel <= _PAGE else -(-numel // _PAGE)


def _are_short(count: int, numel: int) -> bool:
    return 2 * count + 4 * _pages(numel) <= 4 * count


def _write_indices(chosen: torch.Tensor, numel: int, payload: torch.Tensor) -> None:
    """Write rising indices: 32 bits each, or how many lie in each page of 65,536, then their lower 16 bits."""
    if not _are_short(len(chosen), numel):
        payload.view(torch.int32).copy_(chosen)
        return
    pages = _pages(numel)
    if pages:
        starts = torch.arange(1, pages, device=chosen.device) * _PAGE
        borders = torch.searchsorted(chosen, starts)
        first = torch.zeros(1, dtype=borders.dtype, device=chosen.device)
        last = torch.full_like(first, len(chosen))
        payload[: 4 * pages].view(torch.int32).copy_(torch.diff(torch.cat([first, borders, last])))
    payload[4 * pages :].view(torch.int16).copy_(chosen)


def _read_indices(payload: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    """Undo `_write_indices`."""
    if not _are_short(count, numel):
        return payload.view(torch.int32).long()
    pages = _pages(numel)
    indices = payload[4 * pages :].view(torch.int16).long() & (_PAGE - 1)
    if pages:
        starts = torch.arange(pages, device=payload.device) * _PAGE
        counts = payload[: 4 * pages].view(torch.int32).long()
        indices += torch.repeat_interleave(starts, counts, output_size=count)
    return indices
