"""Recomputing a run from its receipts and payloads: was it merged as its settings say, and what if it had not been?

`replay` computes every version that is still recomputable with the very functions that made it, and compares. `what_if`
computes them once more along a changed rule, each on top of the recomputed one, into a store of its own. The run's
store is only read from: nothing here writes to it, not even to ask it for the time.
"""

from diloco_blob.aggregate.replay.checking import REPLAY_PROMISES, ReplayCounts, ReplayReport, replay
from diloco_blob.aggregate.replay.whatif import Effect, WhatIfReport, changed_merge, what_if

__all__ = [
    "REPLAY_PROMISES",
    "Effect",
    "ReplayCounts",
    "ReplayReport",
    "WhatIfReport",
    "changed_merge",
    "replay",
    "what_if",
]
