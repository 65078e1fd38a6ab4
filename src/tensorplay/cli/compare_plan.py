"""What a comparison consists of, and the files through which its processes talk.

<folder>/job.json             the launcher writes it, the ranks read it
<folder>/events.jsonl         rank 0 appends a line for all that begins or ends; the launcher follows it
<folder>/error_rank<r>.json   a rank that fails leaves its error here
<folder>/rank<r>.log          what each rank printed
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Job", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What is alike in every cell of a comparison.

    Attributes:
        model: the workload's name; see `tensorplay.cli.workload`.
        rounds: how often each hook is run, always with a fresh model.
        steps: measured steps a run. warmup: steps before them.
        seed: of weights and data.
        threads: of every rank.
        hook_timeout: seconds without a finished step after which a hook counts as hanging.
        advise: ask `tensorplay.advisor` first, in every cell.
    """

    model: str
    rounds: int
    steps: int
    warmup: int
    seed: int
    threads: int
    hook_timeout: float
    advise: bool


@dataclass(frozen=True)
class Job:
    """What one launch of the ranks of a cell has to do.

    Attributes:
        settings: those of the whole comparison.
        device: the interface whose bytes are read, or "" where it isn't the rank's alone.
        todo: (round, hook) in the order of running.
        advise_for: hooks to ask the advisor about before the first one; empty: it isn't asked.
        folder: of the files above.
        launcher_process: process id of the launcher; a rank that loses it ends itself.
    """

    settings: Settings
    device: str
    todo: tuple[tuple[int, str], ...]
    advise_for: tuple[str, ...]
    folder: Path
    launcher_process: int

    @property
    def path(self) -> Path:
        """Of the job itself."""
        return self.folder / "job.json"

    @property
    def events_path(self) -> Path:
        """Where rank 0 writes."""
        return self.folder / "events.jsonl"

    def error_path(self, rank: int) -> Path:
        """Where `rank` writes the error that ended it."""
        return self.folder / f"error_rank{rank}.json"

    def save(self) -> None:
        """Write the job."""
        fields = {**asdict(self), "folder": str(self.folder)}
        self.path.write_text(json.dumps(fields, indent=1), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> "Job":
        """Read what `save` wrote.

        Example:
            >>> import tempfile
            >>> settings = Settings("mlp", 1, 2, 1, 0, 1, 60.0, False)
            >>> job = Job(settings, "eth0", ((0, "int8"),), (), Path(tempfile.mkdtemp()), 1)
            >>> job.save()
            >>> Job.load(job.path) == job
            True
        """
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        return Job(
            settings=Settings(**fields["settings"]),
            device=fields["device"],
            todo=tuple((number, hook) for number, hook in fields["todo"]),
            advise_for=tuple(fields["advise_for"]),
            folder=Path(fields["folder"]),
            launcher_process=fields["launcher_process"],
        )
