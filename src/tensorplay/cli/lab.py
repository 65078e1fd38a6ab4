"""Hosts on one machine: network namespaces joined by links of a chosen rate. Needs root and iproute2.

    with Lab(4, "1gbit") as lab:
        lab.run(["python", "worker.py"])    # once a rank, RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

Each rank has a full-duplex link of that rate to one switch: upload is shaped at its own end, download at the switch.
Nothing leaves the lab: no other address exists in the namespaces.

    python -m tensorplay.cli.lab            # says whether a lab can be made here
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

__all__ = ["UNLIMITED", "Lab", "available", "bits_per_second", "rank_variables"]

UNLIMITED = "unlimited"
"""The rate of a link that is not shaped."""

# More than one 64 kB frame: with less, the shaper cuts every frame into packets and the CPU pays for it.
_BURST = "256kb"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def available() -> str:
    """Why a lab can't be made here, or '' when it can: one of a single host is tried.

    Example:
        >>> reason = available()
        >>> isinstance(reason, str)
        True
    """
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    try:
        with Lab(1, "1gbit", name=f"tpt{os.getpid() % 100000}"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"the kernel refused: {' '.join(error.cmd[:6])} …: {error.stderr.strip()}"


def bits_per_second(rate: str) -> float | None:
    """The number that a rate spells; None for "unlimited".

    Raises: ValueError: neither a number above 0 with kbit, mbit or gbit, nor "unlimited".
    Example:
        >>> bits_per_second("200mbit"), bits_per_second("unlimited")
        (200000000.0, None)
    """
    if rate == UNLIMITED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"a rate must be written like 200mbit, 1gbit or unlimited, got {rate!r}")
    return float(match[1]) * _UNITS[match[2]]


def rank_variables(rank: int, world_size: int, address: str, port: int) -> dict[str, str]:
    """What a process needs to join a group as `rank`; rank 0 listens at `address` and `port`.

    Example:
        >>> rank_variables(1, 2, "127.0.0.1", 29500)["MASTER_PORT"]
        '29500'
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Lab:
    """`world_size` hosts behind one switch.

    Args:
        world_size: hosts, 1 to 254. rate: "200mbit", "1gbit", … as tc writes it, or "unlimited".
        name: begins the names of the namespaces; of this process by default.

    Raises: subprocess.CalledProcessError on entering, with nothing left behind: the kernel or its tools refused.
    Example:
        >>> with Lab(2, "1gbit") as lab:                                    # doctest: +SKIP
        ...     lab.run(["hostname"])
    """

    def __init__(self, world_size: int, rate: str, name: str = "") -> None:
        self.world_size, self.rate = world_size, rate
        self.name = name or f"tp{os.getpid() % 100000}"

    def __enter__(self) -> "Lab":
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _build(self) -> None:
        switch = f"{self.name}-sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for rank in range(self.world_size):
            host = f"{self.name}-{rank}"
            _ip("netns", "add", host)
            ends = (("eth0", host), (f"p{rank}", switch))
            (device, namespace), (peer, peer_namespace) = ends
            near = ("link", "add", device, "netns", namespace, "type", "veth")
            _ip(*near, "peer", "name", peer, "netns", peer_namespace)
            _ip("-n", switch, "link", "set", f"p{rank}", "master", "br0", "up")
            _ip("-n", host, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "link", "set", "eth0", "up")
        self.shape(self.rate)

    def shape(self, rate: str) -> None:
        """Change the rate of every link; running processes go on."""
        self.rate = rate
        for rank in range(self.world_size):
            for namespace, device in ((f"{self.name}-{rank}", "eth0"), (f"{self.name}-sw", f"p{rank}")):
                base = ["ip", "netns", "exec", namespace, "tc", "qdisc"]
                subprocess.run([*base, "del", "dev", device, "root"], capture_output=True, check=False)
                if rate != UNLIMITED:
                    shaper = ["tbf", "rate", rate, "burst", _BURST, "latency", "50ms"]
                    command = [*base, "add", "dev", device, "root", *shaper]
                    subprocess.run(command, check=True, capture_output=True, text=True)

    def bytes_on_wire(self, rank: int) -> tuple[int, int]:
        """Bytes rank's interface has sent and received so far."""
        command = ["ip", "netns", "exec", f"{self.name}-{rank}", "cat", "/proc/net/dev"]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        fields = next(line for line in listing.splitlines() if "eth0:" in line).split(":")[1].split()
        return int(fields[8]), int(fields[0])

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[str] | int | None = None,
        stderr: IO[str] | int | None = None,
    ) -> "subprocess.Popen[str]":
        """Start `command` on rank's host; `environment` goes on top of this process's and the lab's own variables.

        The process that is started becomes the command: its parent is this process.
        """
        own = rank_variables(rank, self.world_size, "10.77.0.1", 29500)
        variables = {**os.environ, **own, "GLOO_SOCKET_IFNAME": "eth0", **environment}
        inside = ["ip", "netns", "exec", f"{self.name}-{rank}", *command]
        return subprocess.Popen(inside, env=variables, stdout=stdout, stderr=stderr, text=True)

    def run(self, command: Sequence[str], timeout_seconds: float = 1800) -> list[str]:
        """Run `command` once a host, with one thread; returns each rank's output. Ends all of them when one fails."""
        processes = []
        for rank in range(self.world_size):
            errors = None if rank == 0 else subprocess.DEVNULL
            processes.append(
                self.start(rank, command, {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=errors)
            )
        deadline = time.monotonic() + timeout_seconds
        try:
            outputs = [p.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for p in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        failed = [rank for rank, process in enumerate(processes) if process.returncode]
        if failed:
            raise RuntimeError(f"ranks {failed} of {Path(command[-1]).name} failed")
        return outputs

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for namespace in (*(f"{self.name}-{rank}" for rank in range(self.world_size)), f"{self.name}-sw"):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


if __name__ == "__main__":
    reason = available()
    print(reason or "a lab can be made here")
    sys.exit(1 if reason else 0)
