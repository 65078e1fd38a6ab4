"""What the README and the documents show runs, and the commands they name exist.

A ```python block is run after the earlier ones of its document, in one process that is the single rank of a job, as
a reader would type them. `<!-- no-run -->` on the line before a block has it compiled only.
"""

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.surface import REPOSITORY

DOCUMENTS = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
NO_RUN = "<!-- no-run -->"


@dataclass(frozen=True)
class Block:
    """One fenced ```python block; `line` is the line of its first statement."""

    line: int
    code: str
    runs: bool


def python_blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    lines = text.splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if start is None and re.fullmatch(r"\s*```python\b.*", line):
            start = number + 1
        elif start is not None and line.strip() == "```":
            indent = len(lines[start - 1]) - len(lines[start - 1].lstrip())
            before = next((text for text in reversed(lines[: start - 1]) if text.strip()), "")
            code = "\n".join(text[indent:] for text in lines[start:number])
            blocks.append(Block(start + 1, code, before.strip() != NO_RUN))
            start = None
    if start is not None:
        raise ValueError(f"the block that begins on line {start} has no end")
    return blocks


def script(document: str, blocks: list[Block]) -> str:
    """One program that runs the blocks in order; an error names the document's own line."""
    lines = ["names = {'__name__': '__main__'}"]
    for block in blocks:
        code = "\n" * (block.line - 1) + block.code
        lines.append(f"exec(compile({code!r}, {document!r}, 'exec'), names)")
    lines.append("import torch.distributed")
    lines.append("if torch.distributed.is_initialized(): torch.distributed.destroy_process_group()")
    return "\n".join(lines)


def run_blocks(document: str, blocks: list[Block], folder: Path) -> subprocess.CompletedProcess[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-c", script(document, blocks)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=150)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_code_runs(document: Path, tmp_path: Path) -> None:
    blocks = python_blocks(document.read_text())
    for block in blocks:
        compile("\n" * (block.line - 1) + block.code, document.name, "exec")
    runs = [block for block in blocks if block.runs]
    if runs:
        done = run_blocks(document.name, runs, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_shows_code() -> None:
    assert any(block.runs for block in python_blocks((REPOSITORY / "README.md").read_text()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_make_targets_exist(document: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", document.read_text(), re.DOTALL))
    named = set(re.findall(r"(?:^|[\s`;&$])make ([a-z][a-z-]*)", code))
    assert named - targets == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_files_named_exist(document: Path) -> None:
    """Links to files of the repository, and examples and benchmarks named in commands."""
    text = document.read_text()
    linked = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    missing = [target for target in linked if not (document.parent / target).exists()]
    named = re.findall(r"(?:^|[\s`])((?:examples|benchmarks|docs|tests|src)/[\w./-]+\w)", text)
    missing += [target for target in named if not (REPOSITORY / target).exists()]
    assert missing == []


SAMPLE = """
Text.

```python
x = 1
```

```
y = not python
```

<!-- no-run -->
```python
import a_module_that_is_not_there
```

- in a list:
  ```python
  if x:
      print(x + 1)
  ```
"""


def test_blocks_are_found(tmp_path: Path) -> None:
    blocks = python_blocks(SAMPLE)
    assert [(block.code, block.runs) for block in blocks] == [
        ("x = 1", True),
        ("import a_module_that_is_not_there", False),
        ("if x:\n    print(x + 1)", True),
    ]
    assert [SAMPLE.splitlines()[block.line - 1].strip() for block in blocks] == [
        "x = 1",
        "import a_module_that_is_not_there",
        "if x:",
    ]
    done = run_blocks("SAMPLE.md", [block for block in blocks if block.runs], tmp_path)
    assert (done.returncode, done.stdout) == (0, "2\n")
    done = run_blocks("SAMPLE.md", blocks, tmp_path)
    assert done.returncode == 1
    assert f'File "SAMPLE.md", line {blocks[1].line}' in done.stderr


def test_a_block_without_an_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="begins on line 2 has no end"):
        python_blocks("text\n```python\nx = 1\n")
