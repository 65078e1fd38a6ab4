"""What a demo run consists of, and the files through which its processes talk.

<out>/plan.json           the launcher writes it, the ranks read it
<out>/events.jsonl        rank 0 appends one line a step and one a finished hook; the launcher follows it
<out>/rank_logs/          what each rank printed
<out>/error_rank<r>.json  a rank that fails leaves its error here
<out>/report.json, report.html
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["DemoPlan"]


@dataclass(frozen=True)
class DemoPlan:
    """Everything a rank needs to know.

    Attributes:
        ranks: processes on this machine.
        steps: training steps under each hook.
        compute_alone_steps: steps of the extra run without any exchange.
        hooks: names, in the order they run.
        seed: of initial weights and data order.
        size: name of the model's size.
        batch_size: windows a rank and step.
        device: "cpu" (gloo) or "cuda" (nccl).
        out: folder of the run's files.
        launcher_process: process id of the launcher; a rank that loses it ends itself.
    """

    ranks: int
    steps: int
    compute_alone_steps: int
    hooks: tuple[str, ...]
    seed: int
    size: str
    batch_size: int
    device: str
    out: Path
    launcher_process: int

    @property
    def events_path(self) -> Path:
        """Where rank 0 writes progress and results."""
        return self.out / "events.jsonl"

    @property
    def logs_folder(self) -> Path:
        """Where each rank's standard output and standard error go."""
        return self.out / "rank_logs"

    def error_path(self, rank: int) -> Path:
        """Where `rank` writes the error that ended it."""
        return self.out / f"error_rank{rank}.json"

    def save(self) -> Path:
        """Write plan.json into the output folder and return its path."""
        path = self.out / "plan.json"
        path.write_text(json.dumps({**asdict(self), "out": str(self.out)}, indent=1), encoding="utf-8")
        return path

    @staticmethod
    def load(path: str | Path) -> "DemoPlan":
        """Read what `save` wrote.

        Example:
            >>> import tempfile
            >>> folder = Path(tempfile.mkdtemp())
            >>> plan = DemoPlan(2, 10, 4, ("allreduce",), 1, "tiny", 4, "cpu", folder, 1)
            >>> DemoPlan.load(plan.save()) == plan
            True
        """
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        return DemoPlan(**{**fields, "hooks": tuple(fields["hooks"]), "out": Path(fields["out"])})
