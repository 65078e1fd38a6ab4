"""What a command of the command line is, and how it reports a user's mistake.

A command is a module with three names, found by `main` through one line of its registry:

    def add_arguments(parser: argparse.ArgumentParser) -> None    its options
    def run(arguments: argparse.Namespace) -> int                 does the work, returns the exit status
"""

import argparse
from typing import Protocol

__all__ = ["INTERRUPTED", "Command", "UsageError"]

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells give it (128 + SIGINT)."""


class UsageError(ValueError):
    """A mistake in what the user asked for: shown as one line, exit status 2, before any work starts.

    Example:
        >>> str(UsageError("--ranks must be >= 1, got 0"))
        '--ranks must be >= 1, got 0'
    """


class Command(Protocol):
    """The two functions that a command module offers; see the module's docstring.

    Example:
        >>> from tensorplay.cli import demo
        >>> command: Command = demo
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's options on `parser`."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do the work and return the exit status. Raises UsageError for a user's mistake."""
        ...
