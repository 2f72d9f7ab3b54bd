"""A reverse proxy on loopback that breaks HTTP on the wire, where no test double could.

    with FaultProxy(server.port) as proxy:
        proxy.add(WireFault("PUT", "drop_answer", path="commits/"))
        ...                              # the client talks to proxy.endpoint
        assert proxy.methods("commits/") == ["PUT", "GET"]

Each request is read whole, sent on, and its answer sent back, unless a fault says otherwise.
"""

import http.client
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal, Self


@dataclass
class WireFault:
    """What happens to which requests."""

    method: str
    effect: Literal["refuse", "drop_answer", "cut_body", "status"]
    """refuse: hang up without sending the request on. drop_answer: send it on, then hang up. cut_body: give the
    answer's headers and half of its body, then hang up. status: answer `status` without sending the request on."""
    path: str = ""
    """A regular expression that is searched for in the path."""
    times: int = 1
    status: int = 503
    body: bytes = b""
    active: Callable[[], bool] = lambda: True
    """Asked at each request: a fault that lasts until a virtual moment."""


class FaultProxy:
    """Stands before the server on `upstream_port`."""

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.log: list[tuple[str, str]] = []
        """Method and path of each request that came, in order."""
        self._faults: list[WireFault] = []
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # so that stopping waits for them, and no socket is left open
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        with self._lock:
            for connection in self._open:
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    def add(self, *faults: WireFault) -> None:
        """Break these, too."""
        with self._lock:
            self._faults += faults

    def methods(self, path: str = "") -> list[str]:
        """The methods of the requests whose path matches, in order."""
        with self._lock:
            return [method for method, asked in self.log if re.search(path, asked)]

    def opened(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)

    def closed(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)

    def note(self, method: str, path: str) -> WireFault | None:
        """Write a request down; return the fault whose turn it is."""
        with self._lock:
            self.log.append((method, path))
            for fault in self._faults:
                if fault.method == method and fault.times > 0 and re.search(fault.path, path) and fault.active():
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    owner: FaultProxy
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.owner.opened(self.connection)

    def finish(self) -> None:
        self.owner.closed(self.connection)
        super().finish()

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.owner.note(self.command, self.path)
        effect = fault.effect if fault else None
        if fault and effect == "status":
            return self.answer(fault.status, [("Date", self.date_time_string())], fault.body)
        self.close_connection = effect is not None
        if effect == "refuse":
            return None
        status, headers, answer = self.ask_upstream(body)
        if effect == "drop_answer":
            return None
        return self.answer(status, headers, answer, cut=effect == "cut_body")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve  # noqa: N815 - the base class's names

    def ask_upstream(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.owner.upstream_port, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in {"expect", "connection"}:
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool = False) -> None:
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        length = lengths[0] if lengths and self.command == "HEAD" else str(len(body))
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing: `FaultProxy.log` keeps what matters."""
