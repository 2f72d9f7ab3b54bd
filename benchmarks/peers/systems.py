"""The systems: which servers each needs, how its workers are started, and what it leaves at the end.

Each is run as its own documentation or examples run it; `worker_<name>.py` says more. The servers of a system are in
the hub, but for our aggregator, which has a cell of its own so that its traffic is seen.
"""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from namespaces import HUB
from safetensors.numpy import load_file
from scenario import AGAIN, NUM_WORKERS, Run, RunError
from task import GO
from typing_extensions import override
from venvs import OWN, python_of

HERE = Path(__file__).resolve().parent
AGGREGATOR = "aggregator"


@dataclass(frozen=True)
class System:
    """One system in one configuration."""

    name: str
    venv: str
    rule: str
    """Merge rule and what crosses the wire, for the table."""
    extra_cells: tuple[str, ...] = ()
    bucket: bool = False
    """Whether workers share nothing but an object store."""
    networked: bool = True

    def prepare(self, run: Run) -> None:
        """Start the servers."""
        if self.bucket:
            run.start("hub_s3", run.hub, [str(python_of(OWN)), str(HERE / "hub_s3.py"), HUB, str(run.folder)])
            run.env.update(json.loads(run.wait_for("s3.json").read_text()))

    def words(self, run: Run, index: int) -> list[str]:
        """Command line of a worker."""
        raise NotImplementedError

    def env(self) -> dict[str, str]:
        """Environment of the workers."""
        return {}

    def start_worker(self, run: Run, index: int, go: str = "go") -> None:
        """Start a worker in its cell; it joins when the file `go` is there."""
        run.start(f"worker-{index}", run.cell(index), self.words(run, index), {**self.env(), GO: go})

    def replace(self, run: Run, index: int) -> None:
        """Start a worker in a dead one's place, which only loads its libraries."""
        self.start_worker(run, index, AGAIN)

    def come_back(self, run: Run, index: int) -> None:
        """What is started only when a dead worker is to come back."""

    def is_ready(self, run: Run) -> bool:
        """Whether all may go."""
        return all(run.has(f"worker-{i}", "ready") for i in range(NUM_WORKERS))

    def begin(self, run: Run) -> None:
        """What is started only when all are ready."""

    def is_done(self, run: Run) -> bool:
        """Whether it is over."""
        return all(run.has(f"worker-{i}", "finished") for i in range(NUM_WORKERS))

    def global_weights(self, run: Run) -> dict[str, Any] | None:
        """The global model that the system itself keeps; None if it keeps none."""
        path = run.folder / "global.npz"
        return dict(np.load(path)) if path.exists() else None

    def python(self, program: str, *words: str) -> list[str]:
        """A program of this folder in this system's environment."""
        return [str(python_of(self.venv)), str(HERE / program), *words]


class Reference(System):
    """No system: one process."""

    @override
    def words(self, run: Run, index: int) -> list[str]:
        """See `System`."""
        return self.python("worker_reference.py", str(run.folder), self.name)

    @override
    def start_worker(self, run: Run, index: int, go: str = "go") -> None:
        """One process is both workers."""
        if index == 0:
            super().start_worker(run, index, go)


class Hivemind(System):
    """hivemind."""

    @override
    def words(self, run: Run, index: int) -> list[str]:
        """See `System`."""
        return self.python("worker_hivemind.py", str(run.folder), str(index), run.cell(index).address)


class Torchft(System):
    """torchft with its lighthouse, whose flags are those of torchft's README."""

    @override
    def prepare(self, run: Run) -> None:
        """See `System`."""
        flags = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        program = python_of(self.venv).parent / "torchft_lighthouse"
        run.start("lighthouse", run.hub, [str(program), "--bind", f"{HUB}:29510", *flags])

    @override
    def words(self, run: Run, index: int) -> list[str]:
        """See `System`."""
        address = run.cell(index).address
        return self.python("worker_torchft.py", str(run.folder), str(index), address, f"http://{HUB}:29510")

    @override
    def env(self) -> dict[str, str]:
        """See `System`."""
        return {"GLOO_SOCKET_IFNAME": "eth0"}


class Flwr(System):
    """Flower: a SuperLink in the hub, a SuperNode for each worker, FedAvgM as the strategy."""

    @override
    def prepare(self, run: Run) -> None:
        """See `System`."""
        path = f"{python_of(self.venv).parent}{os.pathsep}{os.environ['PATH']}"  # its programs start each other
        run.env.update(FLWR_TELEMETRY_ENABLED="0", PATH=path)
        flwr_home = run.folder / "flwr-hub"
        flwr_home.mkdir()
        (flwr_home / "config.toml").write_text(FLWR_CONFIG)
        flags = ["--insecure", "--disable-runtime-dependency-installation", "--host", HUB, "--port", str(FLWR_PORT)]
        run.start("superlink", run.hub, [self._program("flower-superlink"), *flags], {"FLWR_HOME": str(flwr_home)})

    @override
    def words(self, run: Run, index: int) -> list[str]:
        """See `System`."""
        flags = ["--insecure", "--superlink", f"{HUB}:{FLWR_PORT}", "--node-config", f"partition-id={index}"]
        home = tempfile.mkdtemp(prefix=f"flwr-{index}-", dir=run.folder)  # a replacement has nothing of the old one
        return ["env", f"FLWR_HOME={home}", self._program("flower-supernode"), *flags]

    @override
    def is_ready(self, run: Run) -> bool:
        """When the SuperLink listens and the SuperNodes have said that they start; FedAvgM waits for both of them."""
        logs = [run.folder / f"worker-{i}.log" for i in range(NUM_WORKERS)]
        return run.hub.listens(FLWR_PORT) and all("SuperNode" in log.read_text() for log in logs)

    @override
    def replace(self, run: Run, index: int) -> None:
        """A SuperNode joins as soon as it starts, so there is nothing to start yet."""

    @override
    def come_back(self, run: Run, index: int) -> None:
        """See `System`."""
        self.start_worker(run, index)

    @override
    def begin(self, run: Run) -> None:
        """Send the app to the SuperLink."""
        config = f'bench="{HERE}" folder="{run.folder}"'
        words = [self._program("flwr"), "run", str(HERE / "flwr_app"), "bench", "--run-config", config]
        run.start("flwr_run", run.hub, words, {"FLWR_HOME": str(run.folder / "flwr-hub")})

    @override
    def is_done(self, run: Run) -> bool:
        """When the server has saved its weights."""
        return (run.folder / "global.npz").exists()

    def _program(self, name: str) -> str:
        return str(python_of(self.venv).parent / name)


class FlwrServerless(System):
    """flwr-serverless through a bucket."""

    @override
    def words(self, run: Run, index: int) -> list[str]:
        """See `System`."""
        return self.python("worker_flwr_serverless.py", str(run.folder), str(index), "lab")


class Gradientmail(System):
    """gradientmail through a bucket."""

    @override
    def words(self, run: Run, index: int) -> list[str]:
        """See `System`."""
        endpoint = run.env["AWS_ENDPOINT_URL"]
        return self.python("worker_gradientmail.py", str(run.folder), str(index), "lab", endpoint)


@dataclass(frozen=True)
class Ours(System):
    """diloco_blob: islands, and one aggregator."""

    settings: str = ""
    """Of the codecs, in TOML; the rest is the same for all."""

    @override
    def prepare(self, run: Run) -> None:
        """See `System`."""
        super().prepare(run)
        recipe = run.recipe
        text = SETTINGS.format(sync_every=recipe.sync_every, lr=recipe.outer_lr, momentum=recipe.outer_momentum)
        (run.folder / "settings.toml").write_text(text + self.settings)
        words = [str(python_of(OWN).parent / "diloco-blob"), "aggregate", URL, "--watch"]
        run.start(AGGREGATOR, run.network.cells[AGGREGATOR], words)

    @override
    def words(self, run: Run, index: int) -> list[str]:
        """See `System`."""
        return self.python("worker_ours.py", str(run.folder), str(index), URL, "settings.toml")

    @override
    def env(self) -> dict[str, str]:
        """See `System`."""
        return {"DILOCO_ISLANDS": str(NUM_WORKERS)}

    @override
    def global_weights(self, run: Run) -> dict[str, Any] | None:
        """The newest version, as `diloco-blob export` writes it."""
        words = [str(python_of(OWN).parent / "diloco-blob"), "export", URL, str(run.folder / "export")]
        run.start("export", run.network.cells[AGGREGATOR], words)
        try:
            run.wait_for("export/model.safetensors", 30.0)
            run.processes["export"].wait(30.0)
        except RunError:
            return None
        found: dict[str, Any] = load_file(run.folder / "export" / "model.safetensors")
        return found


URL = "s3://lab/run"
FLWR_PORT = 8000
FLWR_CONFIG = f"""\
[superlink]
default = "bench"

[superlink.bench]
address = "{HUB}:{FLWR_PORT}"
insecure = true
"""

SETTINGS = """\
[sync]
sync_every = {sync_every}

[merge]
weights = "uniform"
staleness = "constant"

[outer]
lr = {lr}
momentum = {momentum}

[policy]
deadline_s = 20.0
grace_s = 20.0
"""

INT8 = 'name = "int8"\nerror_feedback = true\n'
INT4 = 'name = "int4"\nerror_feedback = true\n'
TOPK = 'name = "topk"\nchunk = 4096\nkeep = 64\nvalue_bits = 2\nerror_feedback = true\ndecay = 0.95\n'


def _codecs(up: str, down: str) -> str:
    return f"\n[up]\n{up}\n[down]\n{down}"


def _ours(name: str, rule: str, settings: str) -> Ours:
    return Ours(name, OWN, f"DiLoCo, {rule}", (AGGREGATOR,), bucket=True, settings=settings)


SYSTEMS: tuple[System, ...] = (
    Reference("alone", OWN, "none: two separate models", networked=False),
    Reference("diloco", OWN, "DiLoCo in one process", networked=False),
    Hivemind("hivemind", "hivemind", "DiLoCo, fp32"),
    Torchft("torchft", "torchft", "DiLoCo, fp32"),
    Flwr("flwr", "flwr", "FedAvgM, plain momentum, fp32"),
    FlwrServerless("flwr-serverless", "flwr_serverless", "FedAvg without rounds, fp32", bucket=True),
    Gradientmail("gradientmail", "gradientmail", "DiLoCo, fp32", bucket=True),
    _ours("ours fp32", "fp32", ""),
    _ours("ours int8", "int8 up and down", _codecs(INT8, INT8)),
    _ours("ours int4", "int4 up, int8 down", _codecs(INT4, INT8)),
    _ours("ours topk", "top 64 of 4096 up, int4 down", _codecs(TOPK, INT4)),
)
