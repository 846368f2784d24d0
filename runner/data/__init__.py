"""Data sets, and the order in which ranks read their samples.

Factories are imported from their modules, so that this package does not load
torchvision.
"""

from runner.data.dataset import IGNORED, Data, DataUnavailable, TensorPairs, collate_pairs
from runner.data.order import PartitionedBatches

__all__ = [
    "IGNORED",
    "Data",
    "DataUnavailable",
    "PartitionedBatches",
    "TensorPairs",
    "collate_pairs",
]
