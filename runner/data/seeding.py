"""Random generators that depend on a purpose, a seed and an epoch alone."""

import hashlib

import torch


def generator_for(purpose: str, seed: int, epoch: int) -> torch.Generator:
    """Return a CPU generator that is the same on every rank and after a restart."""
    return torch.Generator().manual_seed(seed_for(purpose, seed, epoch))


def seed_for(purpose: str, seed: int, epoch: int) -> int:
    """Return the seed of a generator, an integer of 63 bits."""
    digest = hashlib.blake2b(f"{purpose},{seed},{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
