"""`tensorplay codecs`: what the registry holds, and what each codec sends."""

import argparse
import json

import torch

from tensorplay.cli.command import UsageError
from tensorplay.compression.exchange import choose_route, route_bytes
from tensorplay.compression.registry import codec_entry, known_codecs, make_codec

__all__ = ["add_arguments", "describe", "run"]

_MILLION = 1_000_000
_COLUMNS = ("codec", "bits", "group", "paper")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options on `parser`."""
    parser.add_argument(
        "codecs",
        nargs="*",
        metavar="CODEC",
        help="names, with parameters if wanted (int4:group_size=64); all known ones when left out",
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4, 8], help="group sizes (default: 2 4 8)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def describe(spec: str, ranks: list[int]) -> dict[str, object]:
    """A codec's name, bits a value, group size, paper, and what a rank sends for a million float32 gradients.

    Bytes are those of the route with the fewest on a CPU backend, without headers and padding; uncompressed they are
    8,000,000 (world_size - 1) / world_size.

    Args:
        spec: a codec's name, with or without parameters. ranks: group sizes.
    Raises: ValueError: unknown codec or parameter.
    Example:
        >>> describe("int8", [2])["wire_bytes"]
        {2: 1031316}
    """
    codec = make_codec(spec)
    numel = codec.padded(_MILLION)
    payload_bytes = codec.wire_bytes(numel)
    wire_bytes = {}
    for world_size in ranks:
        route = choose_route(codec, codec, world_size, torch.device("cpu"), True)
        wire_bytes[world_size] = round(route_bytes(route, payload_bytes, payload_bytes, world_size))
    name = spec.partition(":")[0]
    return {
        "codec": codec.name,
        "bits": round(payload_bytes * 8 / numel, 3),
        "group": codec.group_size,
        "wire_bytes": wire_bytes,
        "paper": codec_entry(name).paper,
    }


def run(arguments: argparse.Namespace) -> int:
    """Print a line a codec."""
    for world_size in arguments.ranks:
        if world_size < 2:
            raise UsageError(f"--ranks must be >= 2, got {world_size}")
    try:
        rows = [describe(spec, arguments.ranks) for spec in arguments.codecs or known_codecs()]
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    rows.sort(key=lambda row: float(str(row["bits"])))
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    heading = [
        *_COLUMNS[:3],
        *(f"kB sent, {world_size} ranks" for world_size in arguments.ranks),
        _COLUMNS[3],
    ]
    lines = [heading]
    for row in rows:
        wire_bytes = row["wire_bytes"]
        assert isinstance(wire_bytes, dict)
        kilobytes = [f"{wire_bytes[world_size] / 1000:,.1f}" for world_size in arguments.ranks]
        lines.append(
            [str(row["codec"]), f"{row['bits']:g}", str(row["group"]), *kilobytes, str(row["paper"])]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    for line in lines:
        cells = [
            cell.ljust(width) if column in (0, len(heading) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    print(
        "\nbits: a value, scales and indices included. kB sent: by a rank, for a million gradients in float32."
    )
    return 0
