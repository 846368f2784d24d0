"""The 8x8 handwritten digits that scikit-learn includes, which need no download.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49 (its test part: 1,797 images by 13 writers).

Only the file is used: importing scikit-learn takes longer than training on it. The split equals its
``train_test_split(stratify=...)``, to the sample.
"""

import gzip
import math
from importlib.metadata import distribution

import numpy as np
import torch
from numpy.typing import NDArray

from runner.config.problem import ArgumentError
from runner.data.dataset import Data, TensorPairs

BRIGHTEST = 16.0
"""Largest pixel value: a pixel counts the set pixels, 0 to 16, of a 4x4 block of the scan."""
Integers = NDArray[np.int64]


def digits(test_fraction: float, seed: int) -> Data:
    """Load digits 0 to 9: float32 images [N, 1, 8, 8] in [0, 1] and int64 targets [N]."""
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    with gzip.open(str(file), "rt") as lines:
        table = np.loadtxt(lines, delimiter=",")
    images = torch.tensor(table[:, :-1] / BRIGHTEST, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = table[:, -1].astype(np.int64)
    parts = _split(targets, test_fraction, seed)
    train, test = (TensorPairs(images[part], torch.from_numpy(targets[part])) for part in parts)
    return Data(train, test, items="samples")


def _split(targets: Integers, test_fraction: float, seed: int) -> tuple[Integers, Integers]:
    held_out = math.ceil(test_fraction * len(targets))
    sizes = np.bincount(targets)
    if not len(sizes) <= held_out <= len(targets) - len(sizes):
        raise ArgumentError(
            "test_fraction", f"{test_fraction} leaves too few samples of some classes"
        )
    draw = np.random.RandomState(seed)
    training = _shares(sizes, len(targets) - held_out, draw)
    testing = _shares(sizes - training, held_out, draw)
    parts: tuple[list[int], list[int]] = ([], [])
    for number, size in enumerate(sizes):
        shuffled = np.flatnonzero(targets == number)[draw.permutation(size)]
        end = training[number] + testing[number]
        parts[0].extend(shuffled[: training[number]])
        parts[1].extend(shuffled[training[number] : end])
    return draw.permutation(parts[0]), draw.permutation(parts[1])


def _shares(sizes: Integers, count: int, draw: np.random.RandomState) -> Integers:
    """Divide ``count`` samples among classes in proportion to their sizes."""
    exact = sizes / sizes.sum() * count
    shares: Integers = np.floor(exact).astype(np.int64)
    missing = count - int(shares.sum())  # samples that rounding down has left out
    remainders = exact - shares
    for remainder in np.unique(remainders)[::-1]:
        equal = np.flatnonzero(remainders == remainder)
        if missing:
            drawn = draw.choice(equal, size=min(len(equal), missing), replace=False)
            shares[drawn] += 1
            missing -= len(drawn)
    return shares
