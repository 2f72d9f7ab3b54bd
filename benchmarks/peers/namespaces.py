"""A private network for one run: a namespace for the hub, one for each worker, one cable from each to the hub.

Servers live in the hub. A worker's cable is its device `eth0`, whose counters in /proc/net/dev are what the worker sent
and received, whatever program or library did it. Nothing here can reach the machine's own network, or be reached from
it. Linux and root only.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import IO

from task import link_bytes

HUB = "10.78.0.1"
_BRIDGE = "br0"
_END_S = 10.0
_LISTENING = "0A"
"""In /proc/net/tcp."""


@dataclass(frozen=True)
class Cell:
    """A namespace with an address in the private network."""

    namespace: str
    address: str

    def start(self, words: list[str], *, env: Mapping[str, str], log: IO[bytes], cwd: Path) -> subprocess.Popen[bytes]:
        """Start a program in here, in a session of its own; its output goes to `log`.

        The host's name in here is the address, since there are systems that give others their host's name.
        """
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.address]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *named, *words],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cwd,
            start_new_session=True,
        )

    def pids(self) -> list[int]:
        """Processes that are in here: all are descendants of what was started."""
        return [int(word) for word in _output("ip", "netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """SIGKILL to every process in here, until none is left, as if the machine had lost its power.

        Raises:
            RuntimeError: One of them does not die.
        """
        deadline = monotonic() + _END_S
        while pids := self.pids():
            if monotonic() > deadline:
                raise RuntimeError(f"processes {pids} in {self.namespace} do not end")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            sleep(0.02)

    def link_bytes(self) -> tuple[int, int]:
        """Bytes received and sent through the cable so far."""
        return link_bytes(self._table("dev"))

    def listens(self, port: int) -> bool:
        """Whether a TCP server (IPv4) is up on a port."""
        rows = [line.split() for line in self._table("tcp").splitlines()[1:]]
        return any(row[1].endswith(f":{port:04X}") and row[3] == _LISTENING for row in rows)

    def _table(self, name: str) -> str:
        return _output("ip", "netns", "exec", self.namespace, "cat", f"/proc/self/net/{name}")


@dataclass(frozen=True)
class Network:
    """The hub and the workers' cells, by name."""

    hub: Cell
    cells: dict[str, Cell]

    def all(self) -> list[Cell]:
        """Every cell, the hub last."""
        return [*self.cells.values(), self.hub]


def why_not() -> str:
    """Why there can be no private network here, in one line; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"dp{os.getpid()}t"
    try:
        made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return "the program `ip` (iproute2) is missing"
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    words = ["ip", "-n", name, "link", "add", "name", "try0", "type", "veth", "peer", "name", "try1"]
    tried = subprocess.run(words, check=False, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"no virtual cables (veth) here: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def network(names: list[str]) -> Iterator[Network]:
    """Make the hub and one cell for each name; end all that runs in them, and take them away again, at the end."""
    prefix = f"dp{os.getpid()}"
    hub = Cell(f"{prefix}h", HUB)
    cells = {name: Cell(f"{prefix}c{i}", f"10.78.0.{i + 2}") for i, name in enumerate(names)}
    with contextlib.ExitStack() as stack:
        for cell in (hub, *cells.values()):
            _ip("netns", "add", cell.namespace)
            stack.callback(_ip, "netns", "del", cell.namespace)
            stack.callback(cell.kill)
            # Router solicitations and the like would be counted.
            quiet = "for f in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 > $f; done"
            subprocess.run(["ip", "netns", "exec", cell.namespace, "sh", "-c", quiet], check=False)
            _ip("-n", cell.namespace, "link", "set", "lo", "up")
        _ip("-n", hub.namespace, "link", "add", "name", _BRIDGE, "type", "bridge")
        _ip("-n", hub.namespace, "addr", "add", f"{HUB}/24", "dev", _BRIDGE)
        _ip("-n", hub.namespace, "link", "set", _BRIDGE, "up")
        for i, cell in enumerate(cells.values()):
            peer = ["peer", "name", "eth0", "netns", cell.namespace]
            _ip("-n", hub.namespace, "link", "add", "name", f"c{i}", "type", "veth", *peer)
            _ip("-n", hub.namespace, "link", "set", f"c{i}", "master", _BRIDGE, "up")
            _ip("-n", cell.namespace, "addr", "add", f"{cell.address}/24", "dev", "eth0")
            _ip("-n", cell.namespace, "link", "set", "eth0", "up")
        yield Network(hub, cells)


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, stdin=subprocess.DEVNULL)
