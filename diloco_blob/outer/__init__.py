"""Staleness weights, merge rules, outer optimizers: pure functions over numpy arrays."""

from diloco_blob.outer.merge import merge_tensor
from diloco_blob.outer.optimizer import outer_step
from diloco_blob.outer.weights import Work, island_weights, staleness_factor

__all__ = ["Work", "island_weights", "merge_tensor", "outer_step", "staleness_factor"]
