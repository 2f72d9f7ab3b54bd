"""The aggregator: a function that anyone may start at any time, and that keeps nothing. No torch."""

from diloco_blob.aggregate.context import STEPS
from diloco_blob.aggregate.passes import aggregate
from diloco_blob.aggregate.report import FragmentReport
from diloco_blob.aggregate.watch import watch

__all__ = ["STEPS", "FragmentReport", "aggregate", "watch"]
