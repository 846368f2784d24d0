"""Data sets, and the order in which ranks read their samples.

Each factory has its own module, which `conf/data/*.yaml` names in full
(`runner.data.digits.digits`), so that importing this package loads neither scikit-learn nor
torchvision.
"""

from runner.data.dataset import IGNORED, Data, DataUnavailable, TensorPairs, collate_pairs
from runner.data.order import EmptyPart, PartitionedBatches

__all__ = [
    "IGNORED",
    "Data",
    "DataUnavailable",
    "EmptyPart",
    "PartitionedBatches",
    "TensorPairs",
    "collate_pairs",
]
