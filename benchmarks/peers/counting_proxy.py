"""A reverse proxy before an S3 server that counts requests by client, class and status, whatever SDK sends them.

Requests and answers pass unchanged, the signed Host header included. Both bodies are held in memory: fine for a small
model. The classes are those of a bill: PUT (and POST), GET, HEAD, LIST, DELETE.
"""

import http.client
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

_UPSTREAM_TIMEOUT_S = 60.0


def request_class(method: str, target: str) -> str:
    """Class of an S3 request in path style: a GET of a bucket, or of `?uploads`, is a LIST."""
    url = urlsplit(target)
    _, _, key = url.path.lstrip("/").partition("/")
    if method == "GET" and (not key or "uploads" in parse_qs(url.query, keep_blank_values=True)):
        return "LIST"
    return "PUT" if method == "POST" else method


class CountingProxy:
    """Listens on `address` until the block ends, and passes everything on to 127.0.0.1:`upstream_port`."""

    def __init__(self, address: tuple[str, int], upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(address, Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.socket.close()  # threads of idle connections end with the process

    def count(self, client: str, kind: str, status: int) -> None:
        """Write down one request."""
        with self._lock:
            self._counts[client, kind, status] += 1

    def counts(self) -> dict[str, dict[str, int]]:
        """Requests so far by client address: of each class, and `304`, `404`, `412` of those with that answer."""
        with self._lock:
            seen = dict(self._counts)
        said: dict[str, dict[str, int]] = {}
        for (client, kind, status), number in sorted(seen.items()):
            of_client = said.setdefault(client, {})
            of_client[kind] = of_client.get(kind, 0) + number
            if status >= 300:
                of_client[str(status)] = of_client.get(str(status), 0) + number
        return said


class _Handler(BaseHTTPRequestHandler):
    owner: CountingProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes

    def setup(self) -> None:
        super().setup()
        port = self.owner.upstream_port
        self._upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=_UPSTREAM_TIMEOUT_S)

    def finish(self) -> None:
        self._upstream.close()
        super().finish()

    def serve(self) -> None:
        body = self._body()
        status, headers, answer = self._ask(body)
        self.owner.count(self.client_address[0], request_class(self.command, self.path), status)
        length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", length or str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve  # noqa: N815 - the base class's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts: list[bytes] = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return b"".join(parts)

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Send the request on; over a new connection if the server has closed the kept one."""
        for attempts_left in (1, 0):
            fresh = self._upstream.sock is None
            try:
                self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in {"expect", "connection", "transfer-encoding", "content-length"}:
                        self._upstream.putheader(name, value)
                self._upstream.putheader("Content-Length", str(len(body)))
                self._upstream.endheaders(body)
                answer = self._upstream.getresponse()
                return answer.status, answer.getheaders(), answer.read()
            except (http.client.RemoteDisconnected, ConnectionError):
                self._upstream.close()
                if fresh or not attempts_left:
                    raise
        raise AssertionError("one of the two attempts returns or raises")
