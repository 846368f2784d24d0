"""The 8x8 handwritten digits that scikit-learn includes, which need no download.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49 (its test part: 1,797 images by 13 writers).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from runner.data.dataset import Data, TensorPairs

BRIGHTEST = 16.0
"""Largest pixel value: a pixel counts the set pixels, 0 to 16, of a 4x4 block of the scan."""


def digits(test_fraction: float, seed: int) -> Data:
    """Load digits 0 to 9: float32 images [N, 1, 8, 8] in [0, 1] and int64 targets [N].

    Args:
        test_fraction: share of the samples that is held out, between 0 and 1, equal for each digit.
        seed: seed of the random split.

    Raises:
        ValueError: ``test_fraction`` leaves too few samples for training or testing.
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, not {test_fraction}")
    bunch = load_digits()
    chosen = train_test_split(
        np.arange(len(bunch.target)),
        test_size=test_fraction,
        random_state=seed,
        stratify=bunch.target,
    )

    def part(indices: NDArray[np.int64]) -> TensorPairs:
        images = torch.tensor(bunch.images[indices] / BRIGHTEST, dtype=torch.float32)
        return TensorPairs(images.unsqueeze(1), torch.tensor(bunch.target[indices]).long())

    train, test = (part(indices) for indices in chosen)
    return Data(train=train, test=test, items="samples")
