"""The moments of an island that have a name: where tests kill it, stall it, or let another overtake it.

One seam for all of them: whatever does something that another process can see, or that a restart depends on, is given
`at` and calls it with the step's name. In production that is `ignore`.
"""

STEPS = (
    "create.begin",
    "create.params.after_put",
    "create.run.before_put",
    "create.run.after_put",
    "generation.before_put",
    "generation.after_put",
    "checkpoint.before_write",
    "checkpoint.after_write",
    "send.payload.before_put",
    "send.payload.after_put",
    "send.receipt.before_put",
    "send.receipt.after_put",
    "version.fetched",
    "adopt.before_write",
    "adopt.after_write",
    "departure.before_put",
    "departure.after_put",
)
"""Each is announced as it is reached; docs/protocol.md says when. `…after_put` of a record that is created only if
absent is announced if this call created it, or it is recognised as this island's own."""


def ignore(_: object) -> None:
    """Nobody is told."""
