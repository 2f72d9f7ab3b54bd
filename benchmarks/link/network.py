"""Network namespaces joined by the link emulator: a hub, where the store is, and one namespace for each island.

`network(link, islands)` makes them and takes them away again. Nothing in them can reach the machine's own network or be
reached from it: each has its loopback and one TUN device whose other end is `emulator.py`.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
HUB_ADDRESS = "10.77.0.1"
DEVICE = "link0"
_EMULATOR = [sys.executable, str(HERE / "emulator.py")]
_STOP_S = 20.0


@dataclass(frozen=True)
class Link:
    """The link of each island."""

    rate_mbit: float
    """In each direction, of IP packets."""
    delay_ms: float
    """One way, between any two namespaces."""

    @property
    def mtu(self) -> int:
        """Bytes of a packet; large ones on the fast link, where the emulator could not carry as many small ones."""
        return 9000 if self.rate_mbit > 200 else 1500

    @property
    def name(self) -> str:
        """For people and for keys."""
        return f"{self.rate_mbit:g} Mbit/s, {self.delay_ms:g} ms"


@dataclass
class Network:
    """Namespaces that are up. Index −1 is the hub."""

    link: Link
    namespaces: list[str]
    """Of the islands."""
    hub: str
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """What each island's link carried, by `island-0` …; filled in when the network is taken away."""

    def address(self, island: int) -> str:
        """The address of an island; of the hub for −1."""
        return HUB_ADDRESS if island < 0 else f"10.77.0.{island + 2}"

    def start(
        self,
        island: int,
        words: list[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: IO[bytes] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program in an island's namespace (−1: the hub), under its own process id."""
        namespace = self.hub if island < 0 else self.namespaces[island]
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, *words],
            env={**os.environ, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )


def why_not() -> str:
    """Why there can be no namespaces here, in one line; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces and TUN devices need root"
    name = f"dlt{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return "the program `ip` (iproute2) is missing"
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip() or made.returncode}"
    try:
        command = [*_EMULATOR, "--rate-mbit", "1", "--delay-ms", "0", f"{name}={HUB_ADDRESS}=free"]
        tried = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return f"TUN devices are not allowed here: {tried.stderr.strip().splitlines()[-1]}" if tried.returncode else ""


@contextlib.contextmanager
def network(link: Link, num_islands: int) -> Iterator[Network]:
    """Namespaces and links, until the block ends; processes in them are the caller's to end before.

    Args:
        link: Of each island. The hub has no rate of its own.
        num_islands: How many.

    Raises:
        RuntimeError: The emulator did not start.
    """
    prefix = f"dl{os.getpid()}"
    net = Network(link, [f"{prefix}i{i}" for i in range(num_islands)], f"{prefix}h")
    with contextlib.ExitStack() as stack:
        for name in (net.hub, *net.namespaces):
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        ends = [f"{net.hub}={HUB_ADDRESS}=free"]
        ends += [f"{name}={net.address(i)}=shaped" for i, name in enumerate(net.namespaces)]
        options = ["--rate-mbit", str(link.rate_mbit), "--delay-ms", str(link.delay_ms), "--mtu", str(link.mtu)]
        process = subprocess.Popen(
            [*_EMULATOR, *options, *ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(stop, process)
        assert process.stdout is not None
        if process.stdout.readline().strip() != "READY":
            raise RuntimeError("the link emulator did not start")
        try:
            yield net
        finally:
            said = json.loads(process.communicate(timeout=_STOP_S)[0])  # closes its input, at which it ends
            net.counts.update({f"island-{i}": said[name] for i, name in enumerate(net.namespaces)})


def stop(process: subprocess.Popen[str]) -> None:
    """End a process that we started: politely, then not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def outputs(processes: list[subprocess.Popen[str]], timeout_s: float) -> list[str]:
    """Wait for programs, and give what they printed.

    Raises:
        RuntimeError: One of them failed, or took too long.
    """
    said: list[str] = []
    for process in processes:
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{process.args!r} took longer than {timeout_s:g} s") from error
        if process.returncode:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}:\n{out[-2000:]}")
        said.append(out)
    return said


@contextlib.contextmanager
def storage(net: Network) -> Iterator[dict[str, str]]:
    """SeaweedFS in the hub, with an empty bucket `lab`: what its clients need in their environment."""
    with tempfile.TemporaryDirectory(prefix="link-store-") as folder, Path(folder, "log").open("wb") as log:
        words = [sys.executable, str(HERE / "storage.py"), folder]
        process = net.start(-1, words, stdin=subprocess.PIPE, stderr=log)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the store did not start:\n{Path(folder, 'log').read_text()[-2000:]}")
            yield json.loads(line)
        finally:
            process.communicate(timeout=_STOP_S)  # closes its input, at which it ends
