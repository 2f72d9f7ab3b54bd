"""What is fuzzed: functions of bytes that read them as a hostile island's, and assert what must hold whatever they are.

A target returns quietly if the bytes were refused as documented or read correctly; anything else is a finding. The
same functions serve hypothesis (`test_fuzz_*.py`) and atheris (`fuzz.py`).
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from targets import names, records, rounds, tensors


class Target(NamedTuple):
    """A reader under fire."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    """Inputs to begin with, valid ones among them."""


TARGETS: dict[str, Target] = {
    "record": Target(records.run, records.seeds),
    "tensorfile": Target(tensors.tensorfile, tensors.tensorfile_seeds),
    "frame": Target(tensors.frame, tensors.frame_seeds),
    "payload": Target(tensors.payload, tensors.payload_seeds),
    "name": Target(names.run, names.seeds),
    "round": Target(rounds.run, rounds.seeds),
}
