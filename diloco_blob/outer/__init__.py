"""Staleness weights, clipping, merge rules, outer optimizers: pure functions over numpy arrays."""

from diloco_blob.outer.clip import clip_factors
from diloco_blob.outer.merge import merge_tensor
from diloco_blob.outer.norms import square_sum
from diloco_blob.outer.optimizer import Stepped, in_turn, outer_step, state_kinds
from diloco_blob.outer.weights import Work, bounded_work, island_weights, staleness_factor

__all__ = [
    "Stepped",
    "Work",
    "bounded_work",
    "clip_factors",
    "in_turn",
    "island_weights",
    "merge_tensor",
    "outer_step",
    "square_sum",
    "staleness_factor",
    "state_kinds",
]
