"""The 8x8 handwritten digits that scikit-learn carries: real, small, and there without a network.

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
"""The pixels count the set ones among 4x4 of the scan: 0 to 16."""


def digits(test_fraction: float, seed: int) -> Data:
    """Digits 0 to 9 as float32 images [N, 1, 8, 8] in [0, 1], targets int64 [N].

    Args:
        test_fraction: share held out, between 0 and 1, the same of every digit.
        seed: of the split.

    Raises:
        ValueError: when the fraction leaves too little on either side of the split.
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
