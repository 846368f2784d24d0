"""Random data that a model can partly learn, for tests of speed, memory and correctness."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from runner.data.dataset import IGNORED, Data, TensorPairs

SUCCESSORS = 4
"""Number of equally likely successors of a token: the lowest possible loss is log(4)."""


def synthetic(
    kind: Literal["images", "vectors", "tokens"],
    samples: int,
    test_samples: int,
    shape: Sequence[int],
    num_classes: int,
    sequence_length: int,
    vocabulary: int,
    ignored_fraction: float,
    seed: int,
) -> Data:
    """Make seeded random inputs with targets from a fixed random teacher."""
    generator = torch.Generator().manual_seed(seed)
    count = samples + test_samples
    if min(samples, test_samples) < 1:
        raise ValueError(f"samples {samples} and test_samples {test_samples} must be at least 1")
    if kind == "tokens":
        pairs = _walks(count, sequence_length, vocabulary, ignored_fraction, generator)
    elif kind in ("images", "vectors"):
        if ignored_fraction != 0:
            raise ValueError(f"ignored_fraction {ignored_fraction} must be 0 for {kind}")
        if len(shape) != (3 if kind == "images" else 1):
            raise ValueError(
                f"shape {list(shape)} must be [channels, height, width] for images, "
                "[length] for vectors"
            )
        pairs = _classes(count, tuple(shape), num_classes, generator)
    else:
        raise ValueError(f"kind {kind!r} must be images, vectors or tokens")
    inputs, targets = pairs
    return Data(
        train=TensorPairs(inputs[:samples], targets[:samples]),
        test=TensorPairs(inputs[samples:], targets[samples:]),
        items="tokens" if kind == "tokens" else "samples",
        tokens_per_sample=sequence_length if kind == "tokens" else None,
    )


def _classes(
    count: int, shape: tuple[int, ...], num_classes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return inputs, float32 [count, *shape], and targets, int64 [count]."""
    if min(*shape, num_classes) < 1:
        raise ValueError(f"shape {list(shape)} and num_classes {num_classes} must be at least 1")
    inputs = torch.randn(count, *shape, generator=generator)
    flat = inputs.flatten(1)
    teacher = torch.randn(flat.shape[1], num_classes, generator=generator)
    return inputs, (flat @ teacher).argmax(dim=1)


def _walks(
    count: int, length: int, vocabulary: int, ignored: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return tokens and next tokens, int64 [count, length] each."""
    if min(length, vocabulary) < 1 or not 0 <= ignored < 1:
        raise ValueError(
            f"sequence_length {length} and vocabulary {vocabulary} must be at least 1, "
            f"ignored_fraction {ignored} at least 0 and below 1"
        )
    successors = torch.randint(vocabulary, (vocabulary, SUCCESSORS), generator=generator)
    turns = torch.randint(SUCCESSORS, (length, count), generator=generator)
    steps = [torch.randint(vocabulary, (count,), generator=generator)]
    for turn in turns:
        steps.append(successors[steps[-1], turn])
    walk = torch.stack(steps, dim=1)
    targets = walk[:, 1:].clone()
    if ignored:
        targets[torch.rand(targets.shape, generator=generator) < ignored] = IGNORED
    return walk[:, :-1].contiguous(), targets
