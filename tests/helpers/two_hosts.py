"""Two hosts: two network namespaces of this machine, joined by one link."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT

needs_namespaces = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))),
    reason="network namespaces need Linux, root, iproute2 and util-linux",
)
PORT = 29511


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30).stdout


class Host:
    """A network namespace with the address `10.77.0.N` and a host name."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number, self.address = name, number, f"10.77.0.{number + 1}"
        self.started: list[subprocess.Popen[str]] = []
        ip("netns", "add", name)

    def connect(self) -> None:
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "link0")
        for device in ("lo", "link0"):
            ip("-n", self.name, "link", "set", device, "up")

    def start(self, words: list[str], folder: Path = ROOT, **variables: str) -> subprocess.Popen[str]:
        """Run Python with the arguments `words` on this host."""
        command = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
        self.started.append(
            subprocess.Popen(
                [*command, f"host-{self.number}", sys.executable, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folder,
                env={**environment(), "GLOO_SOCKET_IFNAME": "link0", **variables},
            )
        )
        return self.started[-1]

    def launch(self, words: list[str], folder: Path = ROOT) -> subprocess.Popen[str]:
        """Run `trainwright launch` of two processes, one on each host, with the arguments `words` on this host."""
        options = ["--cpu", "--num_processes", "2", "--num_machines", "2", "--machine_rank", str(self.number)]
        options += ["--main_process_ip", "10.77.0.1", "--main_process_port", str(PORT)]
        return self.start(["-m", "trainwright", "launch", *options, *words], folder)

    def set_link(self, state: str) -> None:
        """Set the link of this host `up` or `down`."""
        ip("-n", self.name, "link", "set", "link0", state)

    def slow_link(self) -> None:
        """Limit what this host sends to 256 kbit/s. A delay would need the kernel's module netem."""
        limit = ["tbf", "rate", "256kbit", "burst", "16kbit", "latency", "400ms"]
        ip("netns", "exec", self.name, "tc", "qdisc", "add", "dev", "link0", "root", *limit)

    def kill(self) -> None:
        for pid in ip("netns", "pids", self.name).split():
            os.kill(int(pid), signal.SIGKILL)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Make two hosts that are joined, and end them with all their processes."""
    made: list[Host] = []
    try:
        for number in range(2):
            made.append(Host(f"trainwright-{os.getpid()}-{number}", number))
        first, second = made
        ends = (["name", "link0", "netns", first.name], ["peer", "name", "link0", "netns", second.name])
        ip("link", "add", *ends[0], "type", "veth", *ends[1])
        for host in made:
            host.connect()
        yield made
    finally:
        for host in made:
            host.kill()
            for process in host.started:
                process.communicate()
            ip("netns", "delete", host.name)
