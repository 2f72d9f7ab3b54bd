"""A star of links in one process: what each node sends and receives is held to a rate, and all of it is delayed.

    python emulator.py --rate-mbit 100 --delay-ms 50 --mtu 1500 NAMESPACE=ADDRESS=shaped NAMESPACE=ADDRESS=free

Each node is a network namespace with one TUN device, `link0`, whose other end is this process. A packet first waits
for its sender's uplink (a first-in-first-out queue, served at the rate), then travels for the delay, then waits for
its receiver's downlink. A `free` node has no rate: the data centre in which the store stands. A queue takes what the
link can carry in the time of one round trip, and 20 ms more; what comes on top is dropped, as a router drops it.

It prints READY when packets can flow, and ends, with a line of JSON that says what each node sent, received and lost,
when its input ends. The kernel here has no netem, and its token bucket has no delay; hence this process. Needs root.
"""

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_DEVICE = "link0"
_BURST = 64
"""Packets that are read from one node before the others, and what is due, get their turn."""
_QUEUE_SPARE_S = 0.02


@dataclass
class Counts:
    """What a node's link carried, in bytes of IP packets."""

    sent: int = 0
    received: int = 0
    dropped: int = 0
    """Packets."""


@dataclass
class Node:
    """One end of the star: a TUN device, and when its link is free again in each direction."""

    fd: int
    bytes_per_s: float
    """0: no limit."""
    uplink_free: float = 0.0
    downlink_free: float = 0.0
    counts: Counts = field(default_factory=Counts)


def enter(namespace: str) -> None:
    """Move this process into a namespace that `ip netns add` made."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open("rb") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")


def make_tun(namespace: str, address: str, mtu: int) -> int:
    """Create the namespace's device, give it the address, and return this end of it. Stays in the namespace."""
    enter(namespace)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN_NO_PI))
    for words in (
        ("link", "set", "lo", "up"),
        ("addr", "add", f"{address}/24", "dev", _DEVICE),
        ("link", "set", _DEVICE, "mtu", str(mtu), "txqueuelen", "5000", "up"),
    ):
        subprocess.run(["ip", *words], check=True)
    return fd


def occupy(free_at: float, now: float, size: int, bytes_per_s: float, queue_s: float) -> float | None:
    """When a packet has passed a link that is busy until `free_at`; None if its queue is full."""
    if not bytes_per_s:
        return now
    start = max(now, free_at)
    return None if start - now > queue_s else start + size / bytes_per_s


class Star:
    """The nodes, and the packets on their way."""

    def __init__(self, nodes: dict[bytes, Node], delay_s: float) -> None:
        self._nodes = nodes
        self._by_fd = {node.fd: node for node in nodes.values()}
        self._delay_s = delay_s
        self._queue_s = 2 * delay_s + _QUEUE_SPARE_S
        self._heap: list[tuple[float, int, bool, Node, bytes]] = []
        """When, a number, whether it has passed the receiver's downlink, the receiver, the packet."""
        self._number = 0

    def run(self) -> None:
        """Carry packets until standard input ends."""
        while True:
            wait = max(0.0, self._heap[0][0] - monotonic()) if self._heap else None
            readable, _, _ = select.select([0, *self._by_fd], [], [], wait)  # poll() rounds to milliseconds
            for fd in readable:
                if fd == 0:
                    if not os.read(0, 4096):
                        return
                else:
                    self._take(self._by_fd[fd])
            self._deliver()

    def _take(self, sender: Node) -> None:
        """Put what a node has sent on its way."""
        for _ in range(_BURST):
            try:
                packet = os.read(sender.fd, 65536)
            except BlockingIOError:
                return
            receiver = self._nodes.get(packet[16:20])
            if receiver is None or packet[0] >> 4 != 4:  # router solicitations of IPv6, and the like
                continue
            passed = occupy(sender.uplink_free, monotonic(), len(packet), sender.bytes_per_s, self._queue_s)
            if passed is None:
                sender.counts.dropped += 1
                continue
            sender.uplink_free = passed
            sender.counts.sent += len(packet)
            self._push(passed + self._delay_s, receiver, packet, is_through=False)

    def _deliver(self) -> None:
        """Do what is due: from the far end of the delay into the downlink, and from the downlink to the node."""
        while self._heap and self._heap[0][0] <= monotonic():
            at, _, is_through, receiver, packet = heapq.heappop(self._heap)
            if is_through:
                with contextlib.suppress(BlockingIOError):
                    os.write(receiver.fd, packet)
                receiver.counts.received += len(packet)
                continue
            passed = occupy(receiver.downlink_free, at, len(packet), receiver.bytes_per_s, self._queue_s)
            if passed is None:
                receiver.counts.dropped += 1
                continue
            receiver.downlink_free = passed
            self._push(passed, receiver, packet, is_through=True)

    def _push(self, at: float, receiver: Node, packet: bytes, *, is_through: bool) -> None:
        self._number += 1
        heapq.heappush(self._heap, (at, self._number, is_through, receiver, packet))


def main() -> None:
    """Make the devices and carry packets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=float, required=True)
    parser.add_argument("--delay-ms", type=float, required=True, help="one way, between any two nodes")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("nodes", nargs="+", metavar="NAMESPACE=ADDRESS=shaped|free")
    args = parser.parse_args()
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # a link does not get slower because the machine is busy
    nodes: dict[bytes, Node] = {}
    names: dict[str, Node] = {}
    for word in args.nodes:
        namespace, address, kind = word.split("=")
        rate = args.rate_mbit * 1e6 / 8 if kind == "shaped" else 0.0
        node = Node(make_tun(namespace, address, args.mtu), rate)
        nodes[bytes(int(part) for part in address.split("."))] = names[namespace] = node
    print("READY", flush=True)
    Star(nodes, args.delay_ms / 1e3).run()
    print(json.dumps({name: asdict(node.counts) for name, node in names.items()}), flush=True)


if __name__ == "__main__":
    main()
