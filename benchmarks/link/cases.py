"""The cases of the benchmark, each one run on links of its own: islands through the bucket, or DistributedDataParallel.

`run_islands` and `run_ddp` return plain dictionaries for `results.json`. Everything is real: SeaweedFS and
`diloco-blob aggregate --watch` in the hub, islands in namespaces of their own, figures from `diloco-blob status --json`
and from the islands themselves.
"""

import contextlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from network import HERE, HUB_ADDRESS, Link, Network, network, outputs, stop, storage

if TYPE_CHECKING:
    import subprocess

NUM_ISLANDS = 2
SYNC_EVERY = 50
MODES = {
    "wait": 'overlap = 0\nadopt = "overwrite"\nnum_fragments = 1',
    "overlap": 'overlap = 1\nadopt = "carry"\nnum_fragments = 4',
}
CODECS = {
    "int4": ('name = "int4"\nerror_feedback = true', 'name = "int8"\nerror_feedback = true'),
    "topk": ('name = "topk"\nchunk = 4096\nkeep = 64\nvalue_bits = 2\nerror_feedback = true\ndecay = 0.95',) * 2,
}
_URL = "s3://lab/run"
_CLI = str(Path(sys.executable).parent / "diloco-blob")
_QUIET = ["nice", "-n", "10", sys.executable]
_SILENT = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # gloo warns that there are no host names in a namespace
_CASE_S = 1200.0


def settings_text(mode: str, codec: str) -> str:
    """The run's settings as TOML."""
    up, down = CODECS[codec]
    return f"""
[sync]
sync_every = {SYNC_EVERY}
{MODES[mode]}

[up]
{up}

[down]
{down}

[outer]
lr = 0.7
momentum = 0.6

[policy]
islands = {NUM_ISLANDS}
quorum = {NUM_ISLANDS}
grace_s = 15.0
deadline_s = 180.0
takeover_s = 10.0

[collect]
keep_versions = 0
"""


def run_probe(link: Link, seconds: float = 4.0) -> dict[str, Any]:
    """What the link of an island does when nothing else uses it: see `probe.py`."""
    with network(link, 1) as net:
        serving = net.start(-1, [sys.executable, str(HERE / "probe.py"), "serve", HUB_ADDRESS])
        try:
            assert serving.stdout is not None
            serving.stdout.readline()
            words = [sys.executable, str(HERE / "probe.py"), "measure", HUB_ADDRESS, str(seconds)]
            (said,) = outputs([net.start(0, words)], _CASE_S)
        finally:
            stop(serving)
    return {"kind": "probe", **asdict(link), "mtu": link.mtu, **json.loads(said)}


def run_islands(link: Link, mode: str, codec: str, steps: int) -> dict[str, Any]:
    """Train on islands through the bucket, from nothing to the last merge.

    Args:
        link: Of each island.
        mode: One of `MODES`.
        codec: One of `CODECS`.
        steps: Inner steps of each island.
    """
    settings = settings_text(mode, codec)
    with network(link, NUM_ISLANDS) as net:
        found = _islands(net, settings, steps)
    case = {"kind": "islands", **asdict(link), "mode": mode, "codec": codec, "steps": steps, "settings": settings}
    return {**case, **found, "link_bytes": net.counts}


def _islands(net: Network, settings: str, steps: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="link-")))
        file = folder / "settings.toml"
        file.write_text(settings)
        log = stack.enter_context((folder / "aggregator.log").open("wb"))
        env = stack.enter_context(storage(net))
        watching = net.start(-1, [_CLI, "aggregate", _URL, "--watch"], env=env, stdout=log, stderr=log)
        stack.callback(stop, watching)
        islands: list[subprocess.Popen[str]] = []
        for i in range(NUM_ISLANDS):
            words = [*_QUIET, str(HERE / "island.py"), _URL, str(i), str(file), "--steps", str(steps)]
            islands.append(net.start(i, words, env=env))
            stack.callback(stop, islands[-1])
        said = [json.loads(out.splitlines()[-1]) for out in outputs(islands, _CASE_S)]
        (status,) = outputs([net.start(-1, [_CLI, "status", _URL, "--json"], env=env)], _CASE_S)
        words = [*_QUIET, str(HERE / "versions.py"), _URL]
        (versions,) = outputs([net.start(-1, words, env=env)], _CASE_S)
    totals = json.loads(status)["totals"]
    return {"islands": said, "totals": totals, "versions": json.loads(versions.splitlines()[-1])}


def run_ddp(link: Link, curve_steps: int = 0) -> dict[str, Any]:
    """Measure a synchronised step on this link, or train and record the loss by step.

    Args:
        link: Of each rank.
        curve_steps: Steps of the whole training; 0: only measure.
    """
    with network(link, NUM_ISLANDS) as net, contextlib.ExitStack() as stack:
        ranks: list[subprocess.Popen[str]] = []
        for i in range(NUM_ISLANDS):
            words = [*_QUIET, str(HERE / "ddp.py"), net.address(0), str(i), "--ranks", str(NUM_ISLANDS)]
            ranks.append(net.start(i, [*words, "--curve", str(curve_steps)], env=_SILENT))
            stack.callback(stop, ranks[-1])
        said = [json.loads(out.splitlines()[-1]) for out in outputs(ranks, _CASE_S)]
    kind = "ddp-curve" if curve_steps else "ddp"
    return {"kind": kind, **asdict(link), "ranks": said, "link_bytes": net.counts}
