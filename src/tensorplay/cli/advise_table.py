"""Advice as text: what was measured, the ranking, the advice, the lines to paste."""

from tensorplay.advisor import Advice, Prediction

__all__ = ["show"]

_HEADING = ("", "hook", "step s", "from", "x plain", "MB sent", "accuracy", "why")


def show(advice: Advice, model: str) -> str:
    """The text `tensorplay advise` prints.

    Example:
        >>> print(show(advice, "mlp"))                                     # doctest: +SKIP
    """
    parts = [_measured(advice, model), _ranking(advice), _cautions(advice), _verdict(advice)]
    return "\n\n".join(part for part in parts if part)


def _measured(advice: Advice, model: str) -> str:
    trace = advice.trace
    size = f"{advice.parameters:,} parameters, {advice.gradient_bytes / 1e6:.1f} MB of gradients"
    ready = f"{trace.ready_seconds[0]:.3f} s, the last after {trace.ready_seconds[-1]:.3f} s"
    here = f"{_count(advice.ranks_on_host, 'rank')} of {_count(advice.threads, 'thread')}"
    lines = [
        f"{model}: {size} in {_count(len(trace.bucket_bytes), 'bucket')}",
        f"{_count(advice.world_size, 'rank')} on {_count(advice.hosts, 'host')}; here {here} on {advice.cores:g} cores",
        f"a step without exchange takes {trace.step_seconds:.3f} s; the first gradients are ready after {ready}",
    ]
    for link in advice.links:
        what = "all-reduce in the group" if link.between == "group" else f"a pair {link.between}"
        lines.append(
            f"{what}: {1e6 * link.latency_seconds:,.0f} us, {8e-9 * link.bytes_per_second:.3g} Gbit/s a rank"
        )
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ranking(advice: Advice) -> str:
    rows = [_HEADING, *(_row(advice, prediction) for prediction in advice.predictions)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADING))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in (2, 4, 5) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(advice: Advice, prediction: Prediction) -> tuple[str, ...]:
    known = prediction.step_seconds == prediction.step_seconds
    return (
        "->" if prediction.hook == advice.best.hook else "",
        prediction.hook,
        f"{prediction.step_seconds:.3f}" if known else "-",
        prediction.basis if known else "",
        f"{prediction.gain:.2f}" if known else "-",
        "-" if prediction.sent_bytes is None else f"{prediction.sent_bytes / 1e6:.1f}",
        prediction.risk + ("" if prediction.allowed or not known else " (above --max-risk)"),
        prediction.reason,
    )


def _cautions(advice: Advice) -> str:
    lines = [f"  {p.hook}: {p.caution}" for p in advice.predictions if p.caution]
    return "\n".join(["Accuracy:", *lines]) if lines else ""


def _verdict(advice: Advice) -> str:
    best = advice.best
    if best.hook == "allreduce":
        said = "Advice: no compression. No allowed hook saves enough of plain all-reduce's step here."
    else:
        said = (
            f"Advice: {best.hook}, {best.gain:.2f} x as fast as plain all-reduce "
            f"({best.step_seconds:.3f} s a step, {'measured in a trial' if best.tried_seconds else 'predicted'})."
        )
        if best.caution:
            said += f"\nCaution: {best.caution}."
    quickest = advice.predictions[0]
    if quickest.hook != best.hook and not quickest.allowed:
        said += f"\nFaster, but above --max-risk {advice.max_risk}: {quickest.hook} ({quickest.risk})."
    paste = "\n".join(f"    {line}".rstrip() for line in advice.lines_to_paste().splitlines())
    return f"{said}\n\n{paste}\n\nFound in {advice.seconds:.0f} s."
