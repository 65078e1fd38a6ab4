"""Entry point of the `tensorplay` command. A new command is one module and one line in COMMANDS."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn, cast

from tensorplay.cli.command import INTERRUPTED, Command, UsageError

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("tensorplay.cli.demo", "train a small GPT on this machine under several hooks, side by side"),
    "compare": (
        "tensorplay.cli.compare",
        "measure hooks side by side over links of chosen rates, ours and torch's",
    ),
    "advise": ("tensorplay.cli.advise", "say which hook pays on this cluster with this model, and why"),
    "report": ("tensorplay.cli.report", "draw what telemetry recorded as one HTML page"),
    "codecs": ("tensorplay.cli.codecs", "list the codecs and what each of them sends"),
}
"""Name on the command line -> (module, one line of help)."""


class _OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser; only the module of the command that is asked for gets imported."""
    parser = _OneLineParser(prog="tensorplay", description="Data-parallel PyTorch that communicates less.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, (module, help_line) in COMMANDS.items():
        subparser = commands.add_parser(name, help=help_line, description=help_line)
        if name == asked:
            command = cast(Command, importlib.import_module(module))
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: done. 1: it failed while running. 2: the user's mistake, told in one line. 130: Ctrl-C.

    Args:
        arguments: what follows `tensorplay` on the command line; None takes sys.argv.

    Example:
        >>> main(["demo", "--ranks", "0"])
        2
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    name = "tensorplay"
    try:
        parsed = _parser(arguments).parse_args(arguments)
        name = f"tensorplay {parsed.command}"
        return int(parsed.run(parsed))
    except UsageError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "matplotlib"):
            raise
        hint = "pip install 'tensorplay-distributed[cli]'"
        print(f"{name}: error: the command line needs {error.name}: {hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
