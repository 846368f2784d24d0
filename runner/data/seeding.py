"""Random generators that a name, a seed and an epoch determine, and nothing else does."""

import hashlib

import torch


def generator_for(purpose: str, seed: int, epoch: int) -> torch.Generator:
    """A CPU generator, the same on every rank and after every restart.

    Hashed rather than added, where epoch 1 of seed 0 would be epoch 0 of seed 1; the purpose keeps
    two uses of one seed apart.
    """
    words = f"{purpose},{seed},{epoch}".encode()
    digest = hashlib.blake2b(words, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
