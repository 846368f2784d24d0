"""Data sets of one training job, and the order in which ranks read them.

The factories live one to a file and are named in full by `conf/data/*.yaml`
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
