"""What an accelerator does otherwise: figures stay on it, and fused kernels read the flag."""

import copy
import math

import pytest
import torch
from torch import nn

from runner import Booster, CheckpointSaver, GradientClipping, Trainer
from runner.clip import build
from runner.data.dataset import TensorPairs, collate_pairs
from runner.gradients import Layout
from tests.checkpoint import test_saver
from tests.distributed.by_hand import batch_for, make
from tests.distributed.cases import Case, differences, train
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
THRESHOLDS = {"none": None, "norm": 0.5, "value": 0.1, "adaptive": 0.05}


def boosted(fused):
    """A model on the GPU, and what takes a clipped step by a multiple of its loss."""
    raw = make("conv", torch.float32).cuda()
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1, fused=fused)
    model, optimizer, *_ = Booster().boost(raw, optimizer)
    inputs, targets = (part.cuda() for part in batch_for("conv", torch.float32))
    mode = build("norm", threshold=0.5)

    def step(factor):
        optimizer.backward(nn.functional.cross_entropy(model(inputs), targets) * factor)
        outcome = optimizer.clip(mode)
        optimizer.step()
        optimizer.zero_grad()
        return outcome

    return model, step


@pytest.mark.parametrize("mode", THRESHOLDS)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_same_clip_as_on_the_cpu(mode, norm_type):
    host = make("conv")
    images, targets = batch_for("conv")
    nn.functional.cross_entropy(host(images), targets).backward()
    device = copy.deepcopy(host)
    for mine, theirs in zip(device.parameters(), host.parameters(), strict=True):
        mine.grad = theirs.grad.clone()
    device.cuda()
    outcomes = []
    for model in (host, device):
        layout = Layout.of_model(model)
        clipper = build(mode, threshold=THRESHOLDS[mode], norm_type=norm_type)
        clipper.bind(layout)
        outcome = clipper.clip(layout)
        outcomes.append([float(figure) for figure in outcome.metrics])
    assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-12, nan_ok=True)
    for mine, theirs in zip(device.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-10, atol=1e-14)


def test_a_step_waits_for_nothing():
    _, step = boosted(fused=True)
    step(1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome = step(1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(outcome.norm) > 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_not_finite_is_skipped(fused):
    model, step = boosted(fused)
    before = [p.detach().clone() for p in model.parameters()]
    step(math.nan)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training(precision):
    pair = batch_for("conv", torch.float32)
    data = TensorPairs(*(part.repeat(8, *[1] * (part.ndim - 1)) for part in pair))
    loader = torch.utils.data.DataLoader(data, 16, collate_fn=collate_pairs)
    summary = Trainer(
        make("conv", torch.float32).cuda(),
        loader,
        "10ep",
        [GradientClipping("norm", 0.5)],
        loader,
        booster=Booster(precision),
    ).fit()
    assert summary["final"]["eval/accuracy"] > 0.9
    assert 0 < summary["clip/ratio_total"] <= 1


def under_plugins(names, cases):
    device = torch.device("cuda", torch.cuda.current_device())
    return [[train(case, name, device=device) for case in cases] for name in names]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_plugin_over_nccl(world):
    """Ranks on GPUs of their own, as many as there are, take the step of one process on a CPU."""
    if world > torch.cuda.device_count():
        pytest.skip(f"needs {world} GPUs")
    names = ["ddp", "fsdp", "zero1", "zero2", "zero3", "tensor", "sequence", "1f1b", "moe"]
    cases = [Case("moe", mode) for mode in ("L2", "inf", "value", "adaptive")]
    backend = "cpu:gloo,cuda:nccl"
    ranks = run_ranks(under_plugins, world, names, cases, backend=backend)
    for i, name in enumerate(names):
        for j, case in enumerate(cases):
            problems = differences([rank[i][j] for rank in ranks], case, 1e-10)
            assert not problems, (name, case, problems[:5])


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path):
    saver = CheckpointSaver(tmp_path, "5ba", keep=9)
    whole = test_saver.trainer(device="cuda", saver=saver)
    whole.fit()
    again = test_saver.trainer(device="cuda")
    again.load(tmp_path / "step_000000010")
    again.fit()
    for name, tensor in test_saver.weights(whole).items():
        assert torch.equal(test_saver.weights(again)[name], tensor), name
