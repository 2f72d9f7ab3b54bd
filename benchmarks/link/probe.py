"""What a link really does: round trip and goodput of one TCP connection, between two namespaces.

    python probe.py serve ADDRESS
    python probe.py measure ADDRESS [SECONDS]

`measure` prints JSON: the median round trip of one byte in ms, and Mbit/s of payload sent up and received down.
"""

import json
import socket
import statistics
import sys
from time import monotonic

PORT = 7000
_BLOCK = bytes(1 << 16)
_PINGS = 11


def serve(address: str) -> None:
    """Answer one client: echo, swallow, pour, for as long as its connection lasts."""
    with socket.create_server((address, PORT)) as server:
        print("READY", flush=True)
        for _ in range(3):
            connection, _ = server.accept()
            with connection:
                _answer(connection, connection.recv(1))


def _answer(connection: socket.socket, wish: bytes) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        if wish == b"e":
            while byte := connection.recv(1):
                connection.sendall(byte)
        elif wish == b"s":
            num_bytes, first, last = 0, 0.0, 0.0
            while data := connection.recv(1 << 16):
                last = monotonic()
                num_bytes += len(data) if first else 0  # time runs from the first bytes' arrival
                first = first or last
            connection.sendall(json.dumps({"bytes": num_bytes, "seconds": last - first}).encode())
        else:
            while True:
                connection.sendall(_BLOCK)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the client has what it wanted


def measure(address: str, seconds: float) -> dict[str, float]:
    """Round trip in ms, goodput in Mbit/s up and down.

    Args:
        address: Of a `serve`.
        seconds: How long to send, and to receive; the first tenth of what is received does not count.
    """
    with socket.create_connection((address, PORT)) as echo:
        echo.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        echo.sendall(b"e")
        trips = []
        for _ in range(_PINGS):
            start = monotonic()
            echo.sendall(b"x")
            echo.recv(1)
            trips.append(monotonic() - start)
    with socket.create_connection((address, PORT)) as up:
        up.sendall(b"s")
        end = monotonic() + seconds
        while monotonic() < end:
            up.sendall(_BLOCK)
        up.shutdown(socket.SHUT_WR)
        said = json.loads(up.recv(4096))
    with socket.create_connection((address, PORT)) as down:
        down.sendall(b"d")
        begun = monotonic()
        num_bytes, first, last = 0, 0.0, begun
        while last < begun + seconds:
            size = len(down.recv(1 << 16))
            last = monotonic()
            if last < begun + seconds / 10:
                continue
            if first:
                num_bytes += size
            first = first or last
    return {
        "round_trip_ms": 1e3 * statistics.median(trips),
        "up_mbit": said["bytes"] * 8e-6 / said["seconds"],
        "down_mbit": num_bytes * 8e-6 / (last - first),
    }


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        print(json.dumps(measure(sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 4.0)))
