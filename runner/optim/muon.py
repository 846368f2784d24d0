"""Muon for the hidden matrices of a model, and AdamW for all other parameters.

Muon orthogonalizes the momentum of a matrix, so it is defined on matrices alone, and its author
advises it for hidden layers: K. Jordan et al., Muon: An optimizer for hidden layers in neural
networks, 2024 (https://kellerjordan.github.io/posts/muon).

=======================================================================  =====
a parameter                                                              steps
=======================================================================  =====
has two dimensions, and no rule below holds                              Muon
is the weight of an embedding, or its own name contains ``embed``        AdamW
is the weight of an output layer (a head), also one that is tied         AdamW
is a vector or a scalar (a bias, a gain, a single number)                AdamW
has three or more dimensions (a convolution, stacked experts)            AdamW
matches a pattern of ``exclude``                                         AdamW
=======================================================================  =====

:class:`torch.optim.Muon` takes matrices alone: it does not flatten the filters of a convolution.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from runner.config.problem import ArgumentError

ADAMW = "adamw_"
"""Prefix of the arguments of :func:`muon_with_adamw` that are AdamW's."""


def muon_with_adamw(
    model: nn.Module,
    *,
    heads: Collection[str] = (),
    exclude: Sequence[str] | None = None,
    fused: bool | None = None,
    **settings: Any,
) -> list[Optimizer]:
    """Return Muon over the hidden matrices of a model, and AdamW over its other parameters.

    Args:
        model: the whole model.
        heads: names of the weights of output layers, which AdamW steps.
        exclude: patterns of the names of further matrices for AdamW.
        fused: whether AdamW steps by one fused kernel.
        settings: arguments of :class:`torch.optim.Muon` (``lr`` is 0.02 if not given), and, with
            the prefix ``adamw_``, of :class:`torch.optim.AdamW`.
    """
    of_adamw = {k.removeprefix(ADAMW): v for k, v in settings.items() if k.startswith(ADAMW)}
    of_muon = {"lr": 0.02} | {k: v for k, v in settings.items() if not k.startswith(ADAMW)}
    hidden = set(hidden_matrices(model, heads, exclude or ()))
    named = dict(model.named_parameters())
    if not hidden:
        raise ValueError(
            f"{type(model).__name__} has no hidden matrix, which Muon is for: its parameters are "
            "convolutions, embeddings, heads and vectors; use optimizer=adamw, or another model "
            "such as model=gpt data=text"
        )
    muon = Muon([parameter for name, parameter in named.items() if name in hidden], **of_muon)
    not_hidden = [parameter for name, parameter in named.items() if name not in hidden]
    if not not_hidden:
        return [muon]
    return [muon, AdamW(not_hidden, fused=fused, **of_adamw)]


def hidden_matrices(
    model: nn.Module, heads: Collection[str] = (), exclude: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the names of the parameters that Muon steps, by the rules at the top of this module."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in exclude:
        if not fnmatch.filter(names, pattern):
            raise ArgumentError("exclude", f"{pattern} matches no parameter")
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters():
        last_name = name.rpartition(".")[2]
        if (
            parameter.ndim == 2
            and id(parameter) not in embeddings
            and "embed" not in last_name
            and name not in heads
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)
        ):
            yield name
