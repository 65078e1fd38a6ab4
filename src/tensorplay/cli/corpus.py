"""Real text that every machine has: the source code of Python's standard library.

1. `sysconfig` names the folder; every `.py` file below it is a candidate.
2. Left out: tests, generated tables, and what some distributions package apart, so that two machines
   with the same Python read the same text.
3. Each file goes to training or to validation by a checksum of its name: a file never moves to the other
   side because another one was added, and no text is on both sides.
"""

import hashlib
import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus", "load_corpus"]

_LEFT_OUT_FOLDERS = frozenset(
    "__pycache__ site-packages dist-packages test tests "  # not the library itself
    "encodings pydoc_data "  # generated tables
    "distutils ensurepip idlelib lib2to3 tkinter turtledemo".split()  # packaged apart by distributions
)
_VALIDATION_ONE_IN = 10
_LEAST_TEXT_BYTES = 200_000


@dataclass(frozen=True)
class Corpus:
    """Text for a byte-level model, split by file.

    Attributes:
        training: uint8 (n,), the training files one after the other.
        validation: uint8 (m,), the validation files.
        fingerprint: first 12 hex digits of a SHA-256 of both, to tell whether two runs read the same text.
        files: number of files read.
    """

    training: Tensor
    validation: Tensor
    fingerprint: str
    files: int

    def training_batch(
        self, step: int, seed: int, rank: int, world_size: int, batch_size: int, context_bytes: int
    ) -> tuple[Tensor, Tensor]:
        """This rank's windows of the global batch of `step`.

        Depends on its arguments alone, so a resumed run, and a run under another hook, reads the same data.
        The global generator is not touched.

        Args:
            step: step of the run, from 0.
            seed: seed of the run.
            rank: this rank; it takes rows rank * batch_size to (rank + 1) * batch_size of the global batch.
            world_size: number of ranks.
            batch_size: windows a rank.
            context_bytes: length of a window.

        Returns:
            inputs and targets, int64 (batch_size, context_bytes); targets are the inputs one byte later.

        Example:
            >>> corpus = load_corpus()
            >>> inputs, targets = corpus.training_batch(0, 1, 0, 2, batch_size=4, context_bytes=32)
            >>> inputs.shape, bool((inputs[:, 1:] == targets[:, :-1]).all())
            (torch.Size([4, 32]), True)
        """
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
        last_start = self.training.numel() - context_bytes
        starts = torch.randint(last_start, (world_size * batch_size, 1), generator=generator)
        mine = starts[rank * batch_size : (rank + 1) * batch_size]
        return _windows(self.training, mine, context_bytes)

    def validation_windows(self, total_bytes: int, context_bytes: int) -> tuple[Tensor, Tensor]:
        """Windows spread evenly over the validation text, about `total_bytes` in all.

        Args:
            total_bytes: how much text to score; more than there is means all of it.
            context_bytes: length of a window.

        Returns:
            inputs and targets, int64 (windows, context_bytes).

        Example:
            >>> load_corpus().validation_windows(3200, context_bytes=32)[0].shape
            torch.Size([100, 32])
        """
        available = (self.validation.numel() - 1) // context_bytes
        windows = max(1, min(available, total_bytes // context_bytes))
        starts = (
            torch.arange(windows).mul_(available).div_(windows, rounding_mode="floor").mul_(context_bytes)
        )
        return _windows(self.validation, starts.unsqueeze(1), context_bytes)


def load_corpus(folder: str | Path | None = None, most_training_bytes: int = 8_000_000) -> Corpus:
    """Read the standard library's source code.

    Args:
        folder: where its `.py` files are; None asks sysconfig.
        most_training_bytes: keep at most this much training text.

    Raises:
        ValueError: fewer than 200,000 bytes of source found, as with a Python that ships its library zipped.

    Example:
        >>> corpus = load_corpus()
        >>> corpus.training.dtype, corpus.training.numel() > corpus.validation.numel()
        (torch.uint8, True)
    """
    root = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for name in _source_names(root):
        for_validation = zlib.crc32(name.encode()) % _VALIDATION_ONE_IN == 0
        parts[for_validation].append((root / name).read_bytes())
    training = b"".join(parts[False])[:most_training_bytes]
    validation = b"".join(parts[True])
    if len(training) + len(validation) < _LEAST_TEXT_BYTES or not validation:
        raise ValueError(
            f"the corpus must hold >= {_LEAST_TEXT_BYTES} bytes of Python source, found "
            f"{len(training) + len(validation)} under {root}; use a Python that ships its library as .py files"
        )
    return Corpus(
        training=_as_tensor(training),
        validation=_as_tensor(validation),
        fingerprint=hashlib.sha256(training + b"\0" + validation).hexdigest()[:12],
        files=len(parts[True]) + len(parts[False]),
    )


def _source_names(root: Path) -> list[str]:
    """Paths below `root` of the files to read, with forward slashes, sorted."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT_FOLDERS]
        for file in files:
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                names.append((Path(folder) / file).relative_to(root).as_posix())
    return sorted(names)


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, context_bytes: int) -> tuple[Tensor, Tensor]:
    """Rows of `text` that begin at `starts` (k, 1), and the same rows one byte later; int64."""
    rows = text[starts + torch.arange(context_bytes + 1)].long()
    return rows[:, :-1], rows[:, 1:]
