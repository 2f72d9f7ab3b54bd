"""A small case of `benchmarks/link`: the emulated link is what it says, and islands train over it.

Skipped, with the reason, where network namespaces or TUN devices are not allowed.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT

BENCH = ROOT / "benchmarks" / "link" / "bench.py"
CANNOT = 77
"""How `bench.py` ends where it may not make namespaces."""


def bench(folder: Path, *words: str) -> dict[str, Any]:
    """Run the benchmark's cases that these words ask for; its results by name."""
    results = folder / "results.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), "--results", str(results), *words], capture_output=True, text=True, timeout=280
    )
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(results.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("rate_mbit", "delay_ms"), [(4.0, 30.0), (40.0, 2.0)])
def test_the_link_has_its_rate_in_each_direction_and_its_delay(
    tmp_path: Path, rate_mbit: float, delay_ms: float
) -> None:
    (probe,) = bench(tmp_path, "--kinds", "probe", "--rates", str(rate_mbit), "--delays", str(delay_ms)).values()

    assert probe["round_trip_ms"] == pytest.approx(2 * delay_ms, abs=15.0)  # a busy machine wakes us late
    assert probe["round_trip_ms"] >= 2 * delay_ms
    for way in ("up_mbit", "down_mbit"):
        # A reader that a busy machine woke late finds what came before its time, too.
        assert 0.6 * rate_mbit < probe[way] < 1.2 * rate_mbit


@pytest.mark.slow
@pytest.mark.timeout(300)  # five programs that import torch or boto3, beside whatever else the machine does
def test_islands_train_over_a_thin_link_and_every_byte_crosses_it(tmp_path: Path) -> None:
    words = ("--kinds", "islands", "--modes", "overlap", "--codecs", "int4", "--steps", "10")
    (case,) = bench(tmp_path, *words, "--rates", "50", "--delays", "5").values()

    totals = case["totals"]
    assert totals["steps"] == 20
    assert totals["tokens_merged"] == 20 * 4 * 64
    first, last = case["versions"][0], case["versions"][-1]
    assert first[1] == 0
    assert first[2] == pytest.approx(8.0, abs=0.01)
    assert last[1] >= 1
    assert last[2] < 7.5
    links = case["link_bytes"].values()
    assert sum(link["sent"] for link in links) > totals["bytes_up"]
    assert sum(link["received"] for link in links) > totals["bytes_down"]
    assert (tmp_path / "results.md").read_text().count("50 Mbit/s, 5 ms") >= 2
