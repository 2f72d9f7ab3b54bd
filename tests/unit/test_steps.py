"""The named steps: an undisturbed run announces every one of them and no other, and docs/protocol.md says when."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from diloco_blob.aggregate import STEPS as AGGREGATOR_STEPS
from diloco_blob.aggregate import aggregate
from diloco_blob.core.settings import Collect, Policy, Settings, Sync
from diloco_blob.island.steps import STEPS as ISLAND_STEPS
from diloco_blob.testing.fleet import Fleet

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"


class Watched(Fleet):
    """A fleet whose aggregator is listened to."""

    def aggregate(self, *, drain=False):
        return aggregate(self.store(), clock=self.clock, ids=self.ids, drain=drain, at=self.heard.append)


def announced(tmp_path: Path, *, num_fragments: int, adopt: str, overlap: int) -> tuple[list[str], list[str]]:
    """What the only island of a run, and its aggregator, announce in three rounds and a rest."""
    policy = Policy(islands=1, quorum=1, grace_s=5.0, deadline_s=30.0, takeover_s=5.0)
    sync = Sync(sync_every=4, num_fragments=num_fragments, adopt=adopt, overlap=overlap)
    fleet = Watched(Settings(sync=sync, policy=policy, collect=Collect(keep_versions=1)), checkpoints=tmp_path)
    fleet.heard = []
    heard: list[str] = []
    fleet.add("island-0", at=heard.append)
    fleet.run(13)
    return heard, fleet.heard


@pytest.mark.parametrize("num_fragments", [1, 2])
@pytest.mark.parametrize(("adopt", "overlap"), [("overwrite", 0), ("carry", 1)])
def test_a_run_announces_every_step_and_no_other(num_fragments: int, adopt: str, overlap: int, tmp_path: Path) -> None:
    island, aggregator = announced(tmp_path, num_fragments=num_fragments, adopt=adopt, overlap=overlap)
    assert set(island) == set(ISLAND_STEPS)
    assert set(aggregator) == set(AGGREGATOR_STEPS)


def test_the_names_are_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    """With one fragment and no overlap nothing happens side by side."""
    island, aggregator = announced(tmp_path, num_fragments=1, adopt="overwrite", overlap=0)
    assert tuple(dict.fromkeys(island)) == ISLAND_STEPS
    assert tuple(dict.fromkeys(aggregator)) == AGGREGATOR_STEPS
    counts = Counter(island)
    for before, after in pairwise(ISLAND_STEPS):
        if before.partition(".before")[1] and after == before.replace("before", "after"):
            assert counts[before] == counts[after], after
    assert counts["send.receipt.after_put"] == counts["adopt.after_write"] == 4


def test_the_page_lists_them() -> None:
    section = PROTOCOL.read_text().partition("\n## Named steps\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_.]+)` \|", section, re.MULTILINE)
    assert tuple(rows) == (*ISLAND_STEPS, *AGGREGATOR_STEPS)
