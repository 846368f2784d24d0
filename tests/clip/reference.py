"""Parameters with gradients, and what float64 arithmetic makes of them."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from tests.on_device import Waits, kept_on_device

SHAPES = [(), (1,), (7,), (0,), (3, 0), (5, 3), (4, 3, 2), (4, 3, 3, 2), (2, 3, 2, 2, 2)]


def on(kept):
    """The context of metrics that stay on an accelerator, or of metrics that the host reads."""
    return kept_on_device() if kept else nullcontext()


@contextmanager
def unwaited(kept=True):
    """Check that the host does not wait for an accelerator, where there is one."""
    with Waits() if kept else nullcontext() as waits:
        yield
    assert not kept or waits.found == []


def norm_of(gradients, p=2.0):
    every = [g.detach().reshape(-1).double() for g in gradients if g is not None]
    return float(torch.linalg.vector_norm(torch.cat([torch.zeros(1).double(), *every]), p))


def refused(error, words, call, /, *args, **options):
    """Check the type of the error of a call and the parts of its message, and return it."""
    with pytest.raises(error) as raised:
        call(*args, **options)
    missing = [word for word in words.split("|") if word not in str(raised.value)]
    assert not missing, str(raised.value)
    return raised.value


def parameters(shapes=SHAPES, seed=0, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in shapes:
        parameter = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        parameter.grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
        made.append(parameter)
    return made


def awkward():
    """Zero weights, zero gradients, strided, channels-last and transposed tensors."""
    pairs = [
        (torch.zeros(3, 4), torch.randn(3, 4)),
        (torch.randn(3, 4), torch.zeros(3, 4)),
        [torch.randn(4, 3, 5, 2).contiguous(memory_format=torch.channels_last) for _ in "wg"],
        (torch.randn(6, 8)[:, ::2], torch.randn(12, 4)[::2]),
        (torch.randn(5, 3), torch.randn(3, 5).t()),
    ]
    made = [nn.Parameter(weight) for weight, _ in pairs]
    for parameter, (_, gradient) in zip(made, pairs, strict=True):
        parameter.grad = gradient
    return [*made, nn.Parameter(torch.randn(2, 2))]


def norm(made, limit, p):
    """Clipped gradients, the share that is clipped, and the largest value compared with λ."""
    gradients = [q.grad.double() for q in made]
    whole = norm_of(gradients, p)
    factor = min(1.0, limit / max(whole, 1e-300))
    return [g * factor for g in gradients], float(whole > limit), whole


def value(made, limit, p):
    every = torch.cat([q.grad.double().reshape(-1) for q in made])
    share = float((every.abs() > limit).double().mean())
    return [q.grad.double().clamp(-limit, limit) for q in made], share, float(every.abs().max())


def per_parameter(made, limit, p):
    each = [norm([q], limit, p) for q in made]
    counted = [over for q, (_, over, _) in zip(made, each, strict=True) if q.numel()]
    return [g for [g], _, _ in each], sum(counted) / len(counted), max(top for _, _, top in each)


def adaptive(made, limit, p, eps=1e-3, dims=None):
    """Units are indexed by dimension 0 of matrices and kernels, or by ``dims`` of each parameter.

    Vectors and scalars are units. No unit is that of an empty tensor, or where ``dims`` is None.
    """
    wanted, over, top = [], [], 0.0
    for number, q in enumerate(made):
        kept = dims[number] if dims else (0,) if q.ndim > 1 else ()
        weight, gradient = q.detach().double(), q.grad.double()
        if kept is not None and q.numel():
            rest = [d for d in range(q.ndim) if d not in kept]
            sizes = [x.square().sum(rest, True) if rest else x.square() for x in (weight, gradient)]
            ratio = sizes[1].sqrt() / sizes[0].sqrt().clamp(min=eps)
            gradient = gradient * (limit / ratio).clamp(max=1.0)
            over += (ratio > limit).flatten().tolist()
            top = max(top, float(ratio.max()))
        wanted.append(gradient)
    return wanted, sum(over) / len(over), top


REFERENCE = {each.__name__: each for each in (norm, value, per_parameter, adaptive)}
