"""The 8x8 handwritten digits that scikit-learn includes, which need no download.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49 (its test part: 1,797 images by 13 writers).

Only the file of scikit-learn is used: importing the package takes longer than training on it. The
split is that of ``sklearn.model_selection.train_test_split(stratify=...)``, to the sample.
"""

import gzip
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from runner.data.dataset import Data, DataUnavailable, TensorPairs

BRIGHTEST = 16.0
"""Largest pixel value: a pixel counts the set pixels, 0 to 16, of a 4x4 block of the scan."""


def digits(test_fraction: float, seed: int) -> Data:
    """Load digits 0 to 9: float32 images [N, 1, 8, 8] in [0, 1] and int64 targets [N]."""
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, not {test_fraction}")
    images, targets = _read()

    def part(indices: NDArray[np.int64]) -> TensorPairs:
        pixels = torch.tensor(images[indices] / BRIGHTEST, dtype=torch.float32)
        return TensorPairs(pixels.unsqueeze(1), torch.tensor(targets[indices]).long())

    train, test = (part(indices) for indices in _split(targets, test_fraction, seed))
    return Data(train=train, test=test, items="samples")


def _read() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataUnavailable("the digits come with scikit-learn: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(file, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def _split(
    targets: NDArray[np.int64], test_fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    held_out = math.ceil(test_fraction * len(targets))
    sizes = np.bincount(targets)
    for name, count in (("training", len(targets) - held_out), ("test", held_out)):
        if count < len(sizes):
            raise ValueError(
                f"test_fraction {test_fraction} leaves {count} {name} samples for "
                f"{len(sizes)} classes"
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


def _shares(sizes: NDArray[np.int64], count: int, draw: np.random.RandomState) -> NDArray[np.int64]:
    """Divide ``count`` samples among classes in proportion to their sizes."""
    exact = sizes / sizes.sum() * count
    shares: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    remainders = exact - shares
    left = count - int(shares.sum())
    for remainder in np.unique(remainders)[::-1]:
        if left == 0:
            break
        equal = np.flatnonzero(remainders == remainder)
        drawn = draw.choice(equal, size=min(len(equal), left), replace=False)
        shares[drawn] += 1
        left -= len(drawn)
    return shares
