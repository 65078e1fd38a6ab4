"""Hold the advisor's predictions against what a comparison measured.

    tensorplay compare --advise --out runs/compare
    python benchmarks/check_advisor.py runs/compare/comparison.json --out benchmarks/results/advisor.json

Exit status 1 when a goal is missed: the formula's median absolute error at most 15 %; the advised hook within 10 % of
the best allowed one in at least 90 % of the cells, and, with every risk allowed, the hook that is predicted to be the
fastest of all within 10 % of the best of all; "auto" never more than 3 % slower than plain all-reduce.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

MOST_ERROR, MOST_BEHIND, LEAST_SHARE, MOST_AUTO_LOSS = 0.15, 0.10, 0.90, 0.03
PLAIN, AUTO = "allreduce", "auto"


def check_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """One cell: errors by hook, how far the advised hook is behind the best ones, and how "auto" did."""
    measured = {row["hook"]: row["step_seconds"] for row in cell["rows"] if row["step_seconds"] is not None}
    if "torch:allreduce" in measured:  # DDP's own stands for the hook where that was not measured
        measured.setdefault(PLAIN, measured["torch:allreduce"])
    advice = cell.get("advice") or {}
    checked: dict[str, Any] = {
        "ranks": cell["ranks"],
        "rate": cell["rate"],
        "hooks": [],
        "auto_over_plain": None,
        "failure": advice.get("failure", None if advice else "the advisor was not asked"),
    }
    plain = measured.get(cell.get("plain") or "", measured.get(PLAIN))
    if AUTO in measured and plain:
        checked["auto_over_plain"] = measured[AUTO] / plain - 1
    if checked["failure"]:
        return checked
    predictions = advice["probe"]["predictions"]
    for prediction in predictions:
        hook = prediction["hook"]
        if hook in measured and prediction["formula_seconds"] is not None:
            tried = prediction["tried_seconds"]
            checked["hooks"].append(
                {
                    "hook": hook,
                    "measured_seconds": measured[hook],
                    "formula_seconds": prediction["formula_seconds"],
                    "formula_error": prediction["formula_seconds"] / measured[hook] - 1,
                    "tried_error": None if tried is None else tried / measured[hook] - 1,
                }
            )
    looked_at = {p["hook"]: p for p in predictions if p["hook"] in measured}
    first = min(looked_at, key=lambda hook: looked_at[hook]["step_seconds"])
    for which, best, hooks in (
        ("allowed", advice["best"], [hook for hook, p in looked_at.items() if p["allowed"]]),
        ("all", first, list(looked_at)),
    ):
        fastest = min(hooks, key=lambda hook: measured[hook])
        checked[f"advised_{which}"], checked[f"best_{which}"] = best, fastest
        checked[f"behind_{which}"] = measured[best] / measured[fastest] - 1
    return checked


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all cells: the numbers that have goals, and which goals are missed."""
    errors = [abs(hook["formula_error"]) for cell in cells for hook in cell["hooks"]]
    tried = [abs(h["tried_error"]) for cell in cells for h in cell["hooks"] if h["tried_error"] is not None]
    asked = [cell for cell in cells if "advised_all" in cell]
    autos = [cell["auto_over_plain"] for cell in cells if cell["auto_over_plain"] is not None]

    def share(key: str) -> float | None:
        return statistics.fmean(cell[key] <= MOST_BEHIND for cell in asked) if asked else None

    found = {
        "predictions": len(errors),
        "formula_median_error": statistics.median(errors) if errors else None,
        "formula_largest_error": max(errors, default=None),
        "tried_median_error": statistics.median(tried) if tried else None,
        "cells": len(asked),
        "within_10_percent_of_best_allowed": share("behind_allowed"),
        "within_10_percent_of_best": share("behind_all"),
        "auto_worst_over_plain": max(autos, default=None),
    }
    missed = [
        f"{cell['ranks']} ranks, {cell['rate']}: {cell['failure']}" for cell in cells if cell["failure"]
    ]
    if not errors:
        missed.append("no prediction stands beside a measurement")
    elif found["formula_median_error"] > MOST_ERROR:
        missed.append(f"formula's median error {found['formula_median_error']:.1%}, goal {MOST_ERROR:.0%}")
    for which in ("best_allowed", "best"):
        within = found[f"within_10_percent_of_{which}"]
        if within is not None and within < LEAST_SHARE:
            name = which.replace("_", " ")
            missed.append(f"within 10 % of the {name} in {within:.0%} of cells, goal {LEAST_SHARE:.0%}")
    if autos and max(autos) > MOST_AUTO_LOSS:
        missed.append(
            f'"auto" up to {max(autos):.1%} slower than plain all-reduce, goal {MOST_AUTO_LOSS:.0%}'
        )
    return {**found, "missed": missed}


def table(cells: list[dict[str, Any]]) -> str:
    """A line a cell and hook, then a line a cell, as Markdown."""
    lines = [
        "| ranks | rate | hook | measured s | formula s | error | trial's error |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for hook in cell["hooks"]:
            tried = "" if hook["tried_error"] is None else f"{100 * hook['tried_error']:+.0f} %"
            lines.append(
                f"| {cell['ranks']} | {cell['rate']} | `{hook['hook']}` | {hook['measured_seconds']:.3f} | "
                f"{hook['formula_seconds']:.3f} | {100 * hook['formula_error']:+.0f} % | {tried} |"
            )
    lines += [
        "",
        "| ranks | rate | advised | best allowed | behind | first of all | best of all | behind | auto to plain |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for cell in cells:
        auto = "" if cell["auto_over_plain"] is None else f"{100 * cell['auto_over_plain']:+.1f} %"
        if "advised_all" in cell:
            lines.append(
                f"| {cell['ranks']} | {cell['rate']} | `{cell['advised_allowed']}` | `{cell['best_allowed']}` | "
                f"{100 * cell['behind_allowed']:.0f} % | `{cell['advised_all']}` | `{cell['best_all']}` | "
                f"{100 * cell['behind_all']:.0f} % | "
                f"{auto} |"
            )
        else:
            lines.append(f"| {cell['ranks']} | {cell['rate']} | {cell['failure']} | | | | | | {auto} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comparison", type=Path, help="comparison.json of tensorplay compare --advise")
    parser.add_argument("--out", type=Path, help="write what was found as JSON")
    arguments = parser.parse_args()
    cells = [check_cell(cell) for cell in json.loads(arguments.comparison.read_text())["cells"]]
    found = summary(cells)
    print(table(cells))
    print()
    for key, value in found.items():
        if key != "missed":
            print(f"{key}: {value:.3f}" if isinstance(value, float) else f"{key}: {value}")
    for missed in found["missed"]:
        print(f"missed: {missed}")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"summary": found, "cells": cells}, indent=1))
    return 1 if found["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
