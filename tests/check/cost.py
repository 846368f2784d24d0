"""Measure what a check adds to the clipping of a step: `python -m tests.check.cost`."""

import time

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from runner.check import check_clipping

SIZES = {
    "one matrix of 16 million": [(4096, 4096)],
    "ResNet-34, 21 million in 110": [(64, 64, 3, 3)] * 14
    + [(128, 128, 3, 3)] * 15
    + [(256, 256, 3, 3)] * 23
    + [(512, 512, 3, 3)] * 6
    + [(256,)] * 52,
    "GPT of 12 layers, 85 million in 148": [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12
    + [(768,)] * 100,
    "2,000 small ones": [(64, 64)] * 1000 + [(64,)] * 1000,
}


def model_of(shapes):
    """A module of these parameters, and a gradient for each."""
    model = nn.ParameterList(torch.randn(shape) for shape in shapes)
    return model, [torch.randn(shape) for shape in shapes]


def processor_seconds(function):
    """The time that this thread works in a call; what others do on the machine counts less."""
    start = time.thread_time()
    function()
    return time.thread_time() - start


def ratio(shapes, repeats=5):
    """What entering, leaving and reporting take, as a multiple of the clipping alone."""
    model, gradients = model_of(shapes)
    limit = 0.5 * float(torch.nn.utils.get_total_norm(gradients))

    def clip():
        return clip_grad_norm_(model.parameters(), limit, foreach=True)

    def clip_and_check():
        with check_clipping(model, limit) as check:
            norm = clip()
        assert check.report(norm).startswith("check_clipping: right")

    unchecked = []
    checked = []
    for _ in range(1 + repeats):  # the first one makes memory
        for function, times in ((clip, unchecked), (clip_and_check, checked)):
            for parameter, gradient in zip(model, gradients, strict=True):
                parameter.grad = gradient.clone()
            times.append(processor_seconds(function))
    return (min(checked[1:]) - min(unchecked[1:])) / min(unchecked[1:])


def main():
    torch.set_num_threads(1)
    for name, shapes in SIZES.items():
        print(f"{name}: a check adds {ratio(shapes):.2f} times the clipping", flush=True)


if __name__ == "__main__":
    main()
