"""The peers' bench, as far as it needs no peer: the common task, counting, the fault, the page."""

import http.client
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers"))
import tables
import venvs
from counting_proxy import CountingProxy, request_class
from scenario import AGAIN, AWAY, KILL_AFTER, STALL_S, Fault, let_go
from systems import SYSTEMS
from task import GO, Evaluator, Recipe, Task, digest, link_bytes, weights

BENCH = Path(tables.__file__).parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with a tiny recipe and random text."""
    recipe = Recipe(seed=3, sync_every=2, rounds=2, batch=2, context=8)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.__dict__))
    rng = np.random.default_rng(0)
    train, held_out = (rng.integers(0, 256, 500, dtype=np.uint8) for _ in range(2))
    np.savez(tmp_path / "text.npz", train=train, held_out=held_out)
    return tmp_path


def test_the_page_divides_by_the_model_that_is_trained() -> None:
    assert sum(p.numel() for p in Recipe().model().parameters()) == tables.PARAMETERS


def test_workers_begin_alike_and_see_different_data(folder: Path) -> None:
    one, again, other = Task(folder, 0), Task(folder, 0), Task(folder, 1)
    assert digest(weights(one.model)) == digest(weights(other.model))
    assert torch.equal(one.batch(1, 0), again.batch(1, 0))
    assert torch.equal(one.batch(0, 2), one.batch(1, 0))  # sync_every is 2: the same step of the stream
    assert not torch.equal(one.batch(0, 0), other.batch(0, 0))


def test_a_round_is_its_steps(folder: Path) -> None:
    one, other = Task(folder, 0), Task(folder, 0)
    one.inner_steps(0)
    for step in range(2):
        other.inner_step(0, step)
    one.finished()
    with np.load(folder / "worker-0.npz") as saved:
        assert digest(dict(saved)) == digest(weights(other.model))
    events = [json.loads(line)["event"] for line in (folder / "worker-0.events").read_text().splitlines()]
    assert events == ["half", "half", "finished"]


def test_a_worker_waits_and_is_told_what_it_missed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GO, AGAIN)
    let_go(folder, "go", 0)
    let_go(folder, AGAIN, 6)
    assert Task(folder, 1).ready() == 6
    (event,) = [json.loads(line) for line in (folder / "worker-1.events").read_text().splitlines()]
    assert (event["event"], event["initial"]) == ("ready", digest(weights(Task(folder, 0).model)))


def test_evaluation_is_of_the_weights_that_are_given(folder: Path) -> None:
    task, evaluator = Task(folder, 0), Evaluator(folder)
    assert evaluator.loss(weights(task.model)) == pytest.approx(np.log(256), abs=1e-5)  # it starts uniform
    with pytest.raises(ValueError, match="not this model's parameters"):
        evaluator.loss({"other": np.zeros(3, np.float32)})


def test_link_bytes_reads_the_kernels_table() -> None:
    table = (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier\n"
        "    lo:     999       9    0    0    0     0          0         0      999       9    0    0    0     0\n"
        "  eth0: 1234567     100    0    0    0     0          0         0    89012      50    0    0    0     0\n"
    )
    assert link_bytes(table) == (1234567, 89012)
    assert link_bytes(table, "eth1") == (0, 0)


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        ("GET", "/lab?list-type=2&prefix=run%2F", "LIST"),
        ("GET", "/lab/?list-type=2", "LIST"),
        ("GET", "/lab/run/run.json", "GET"),
        ("GET", "/lab/run/a%20b?versionId=1", "GET"),
        ("GET", "/lab/key?uploads", "LIST"),
        ("HEAD", "/lab/key", "HEAD"),
        ("PUT", "/lab/key", "PUT"),
        ("POST", "/lab/key?uploads", "PUT"),
        ("DELETE", "/lab/key", "DELETE"),
    ],
)
def test_request_class(method: str, target: str, kind: str) -> None:
    assert request_class(method, target) == kind


class _Echo(BaseHTTPRequestHandler):
    """Answers a PUT with its own body and Host, a GET of `/lab/none` with 404, any other with 304."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, body + self.headers["Host"].encode())

    def do_GET(self) -> None:
        self._answer(404 if self.path == "/lab/none" else 304, b"")

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "77")
        self.end_headers()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""


@pytest.fixture
def upstream() -> Iterator[int]:
    """A server on loopback: its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_the_proxy_passes_on_and_counts(upstream: int) -> None:
    with CountingProxy(("127.0.0.1", 0), upstream) as proxy:
        client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
        client.request("PUT", "/lab/key", b"whole", {"Host": "signed.example"})
        assert client.getresponse().read() == b"wholesigned.example"
        client.request("PUT", "/lab/key", iter([b"in ", b"chunks "]), {"Host": "h"}, encode_chunked=True)
        assert client.getresponse().read() == b"in chunks h"
        for target, status in (("/lab/none", 404), ("/lab/same", 304), ("/lab?list-type=2", 304)):
            client.request("GET", target)
            answer = client.getresponse()
            assert (answer.status, answer.read()) == (status, b"")
        client.request("HEAD", "/lab/key")
        answer = client.getresponse()
        assert (answer.getheader("Content-Length"), answer.read()) == ("77", b"")
        client.close()
        assert proxy.counts() == {"127.0.0.1": {"PUT": 2, "GET": 2, "LIST": 1, "HEAD": 1, "304": 2, "404": 1}}


class _Scene:
    """Stands in for a run: what the workers have done, and what the fault did to them."""

    def __init__(self) -> None:
        self.done = [0, 0]
        self.half = 0
        self.acts: list[Any] = []
        self.processes = {"worker-1": self}

    def rounds(self, index: int) -> int:
        return self.done[index]

    def events(self, _name: str) -> list[dict[str, Any]]:
        return [{"event": "half", "round": r} for r in range(self.half)]

    def cell(self, _index: int) -> "_Scene":
        return self

    def kill(self) -> None:
        self.acts.append("kill")

    def wait(self) -> None:
        self.acts.append("reaped")


def fault_in(scene: Any, folder: Path) -> Fault:
    scene.folder = folder
    return Fault(scene, lambda i: scene.acts.append(("replace", i)), lambda i: scene.acts.append(("back", i)))


def test_worker_1_is_killed_in_the_middle_of_a_round_and_back_after_three(tmp_path: Path) -> None:
    scene = _Scene()
    fault = fault_in(scene, tmp_path)
    scene.half = KILL_AFTER  # as far as the middle of round 3
    fault.look(1.0)
    assert scene.acts == []
    scene.half, scene.done = KILL_AFTER + 1, [KILL_AFTER, KILL_AFTER]
    fault.look(2.0)
    assert scene.acts == ["kill", "reaped", ("replace", 1)]
    scene.done[0] = KILL_AFTER + AWAY - 1
    fault.look(3.0)
    assert scene.acts == ["kill", "reaped", ("replace", 1)]
    scene.done[0] = KILL_AFTER + AWAY
    fault.look(4.0)
    fault.look(5.0)
    assert scene.acts == ["kill", "reaped", ("replace", 1), ("back", 1)]
    assert (tmp_path / AGAIN).read_text() == str(KILL_AFTER + AWAY)
    assert (fault.killed_s, fault.back_s, fault.stalled) == (2.0, 4.0, False)


def test_a_survivor_that_stands_still_gets_worker_1_back(tmp_path: Path) -> None:
    scene = _Scene()
    fault = fault_in(scene, tmp_path)
    scene.half, scene.done = KILL_AFTER + 1, [KILL_AFTER, KILL_AFTER]
    fault.look(2.0)
    scene.done[0] += 1
    fault.look(100.0)
    fault.look(100.0 + STALL_S)
    assert not fault.stalled
    fault.look(100.1 + STALL_S)
    assert fault.stalled
    assert scene.acts[-1] == ("back", 1)
    assert (tmp_path / AGAIN).read_text() == str(KILL_AFTER + 1)


def test_an_old_python_is_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(venvs, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    assert venvs.ensure("gradientmail", None) == "needs Python 3.12 or newer: give --python312 PATH"
    assert "cannot be installed" in venvs.ensure("gradientmail", str(tmp_path / "no-such-python"))
    assert venvs.ensure(venvs.OWN, None) == ""


def test_every_environment_has_pinned_requirements() -> None:
    for name in {system.venv for system in SYSTEMS} - {venvs.OWN}:
        lines = (BENCH / "requirements" / f"{name}.txt").read_text().splitlines()
        assert "==" in lines[0]
        assert "torch==2.13.0" in lines


def worker(loss: float | None, per_round: int) -> dict[str, Any]:
    return {"loss": loss, "rounds_trained": 8, "round_bytes": [[per_round, 2 * per_round]] * 3, "joined": [6]}


def run(system: str, seed: int, losses: tuple[float | None, float | None, float | None], **more: Any) -> dict[str, Any]:
    bits = {"system": system, "seed": seed, "fault": False, "seconds": 10.0, "cut_off": "", "load": 1.0}
    workers = [worker(loss, tables.PARAMETERS) for loss in losses[:2]]
    return {**bits, "workers": workers, "global_loss": losses[2], **more}


def test_the_page_takes_medians_and_differences() -> None:
    link = {f"worker-{i}": {"down": 16 * tables.PARAMETERS, "up": 32 * tables.PARAMETERS} for i in range(2)}
    requests = {"worker-0": {"PUT": 16, "LIST": 4, "412": 8}}
    fault = {"fault": True, "killed_s": 3.0, "back_s": 13.0, "stalled": False}
    results = {
        "recipe": {"rounds": 8},
        "rules": {"diloco": "r", "b": "r", "a": "r"},
        "runs": [
            *(run("diloco", seed, (2.0 + seed, 2.0 + seed, None)) for seed in range(3)),
            *(run("a", seed, (2.1 + seed, 2.3 + seed, None), link=link, requests=requests) for seed in range(3)),
            run("b", 0, (None, None, 2.5), link=link),
            run("b", 0, (None, None, 2.75), link=link, **fault),
            {"system": "b", "seed": 1, "fault": True, "failed": "no such thing"},
        ],
    }
    page = tables.text(results)
    assert "| a | r | 3 | 3.1000 | 3.3000 | - | +0.2000 | 2.000 | 1.000 | 4.000 | 2.000 | - | - | 10 | 1 |" in page
    assert "| b | r | 1 | - | - | 2.5000 | +0.5000 |" in page
    assert "| a | worker-0 | 2.0 | 0.0 | 0.0 | 0.5 | 0.0 | 0.0 | 0.0 | 1.0 | 10 |" in page
    assert "| b | - | - | 2.7500 | +0.2500 | 8 / 8 | 10 | no | 6 | 10 | all done |" in page
    assert "no such thing" in page
    assert page.index("| b | r") < page.index("| a | r")


def test_the_committed_page_is_made_of_the_committed_results() -> None:
    results = json.loads((BENCH / "results.json").read_text())
    assert (BENCH / "results.md").read_text() == tables.text(results)
