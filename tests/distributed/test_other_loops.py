"""Loops of PyTorch, Lightning Fabric, Accelerate and transformers clip as this Trainer does."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from runner import ClippingCallback, GradientClipping, Trainer
from runner.report import figures, read_run, write
from tests.distributed import loops
from tests.distributed.loops import BATCH, CLIPS, MICROBATCHES, STEPS, make_data, make_net
from tests.ranks import run_ranks

# Lightning says at import that Slurm's srun is not used; where to log is transformers' own affair.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The `srun` command"),
]


@cache
def by_trainer(mode):
    """Weights after this project's own Trainer; mode None: without clipping."""
    net = make_net()
    Trainer(
        net,
        DataLoader(make_data(), BATCH),
        "1ep",
        GradientClipping(mode, CLIPS[mode]) if mode else (),
        optimizers=loops.make_optimizer(net),
        accumulation_steps=MICROBATCHES,
    ).fit()
    return loops.whole(net)


@cache
def norms_by_hand():
    """‖G‖ of each step by PyTorch alone, clipped by its norm."""
    net = make_net()
    optimizer = loops.make_optimizer(net)
    norms = []
    for inputs, targets, last in loops.microbatches():
        (cross_entropy(net(inputs), targets) / MICROBATCHES).backward()
        if last:
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), CLIPS["norm"])))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def far(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def require_same(weights, rows, mode):
    assert weights.keys() == by_trainer(mode).keys()
    assert far(weights, by_trainer(mode)) < 1e-6
    assert far(weights, by_trainer(None)) > 0.1  # without clipping they are others
    if mode == "norm":
        norms = norms_by_hand()
        clipped = [min(norm, CLIPS["norm"]) for norm in norms]
        assert [row["train/step"] for row in rows] == [*range(1, STEPS + 1)]
        assert [row["grad/norm"] for row in rows] == pytest.approx(norms, rel=1e-5)
        assert [row["grad/norm_clipped"] for row in rows] == pytest.approx(clipped, rel=1e-5)


@pytest.mark.parametrize("name", loops.LOOPS)
def test_alone_and_under_ddp_and_fsdp2(name):
    for (_, mode), (weights, rows) in loops.run_all(name, ["single"]).items():
        require_same(weights, rows, mode)
    first, second = run_ranks(loops.run_all, 2, name, ["ddp", "fsdp"])
    for (kind, mode), (weights, rows) in first.items():
        require_same(weights, rows, mode)
        others, no_rows = second[kind, mode]
        assert all(torch.equal(weights[key], others[key]) for key in weights)
        assert not no_rows


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs, labels):
        outputs = self.net(inputs)
        return {"loss": cross_entropy(outputs, labels), "logits": outputs}


def by_transformers(folder, callback, max_grad_norm=0, logging_strategy="no"):
    """Weights after the Trainer of transformers."""
    from transformers import Trainer as Theirs
    from transformers import TrainingArguments

    net = make_net()
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=MICROBATCHES,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        report_to="none",
        save_strategy="no",
        logging_strategy=logging_strategy,
        logging_steps=1,
        disable_tqdm=True,
        max_grad_norm=max_grad_norm,
    )
    Theirs(
        WithLoss(net),
        arguments,
        train_dataset=[{"inputs": inputs, "labels": label} for inputs, label in make_data()],
        optimizers=(loops.make_optimizer(net), None),
        callbacks=[callback],
    ).train()
    return loops.whole(net)


def test_the_trainer_of_transformers(tmp_path):
    for mode, threshold in CLIPS.items():
        rows = []
        callback = ClippingCallback(mode, threshold, to=rows.append)
        require_same(by_transformers(tmp_path, callback), rows, mode)
    with pytest.raises(ValueError, match="max_grad_norm=1 clips"):
        by_transformers(tmp_path, ClippingCallback("norm", 0.1), max_grad_norm=1)
    rows = []
    recorded = by_transformers(tmp_path, ClippingCallback(to=rows.append))
    assert far(recorded, by_trainer(None)) < 1e-6  # recorded, not clipped
    assert [row["clip/clipped"] for row in rows] == [0] * STEPS


def by_numpy():
    """Each step's metrics, and the losses of its microbatches, by NumPy in float64."""
    weights = [each.detach().numpy().copy() for each in make_net().parameters()]
    speeds = [np.zeros_like(each) for each in weights]
    every, labels = (each.numpy() for each in make_data().tensors)
    steps, losses = [], []
    for first in range(0, len(every), BATCH * MICROBATCHES):
        gradients = [np.zeros_like(each) for each in weights]
        losses.append([])
        for at in (slice(i, i + BATCH) for i in (first, first + BATCH)):
            inputs, targets = every[at], np.eye(3)[labels[at]]
            one = np.tanh(inputs @ weights[0].T + weights[1])
            two = np.tanh(one @ weights[2].T + weights[3])
            shares = np.exp(two @ weights[4].T + weights[5])
            shares /= shares.sum(1, keepdims=True)
            losses[-1].append(-np.log((shares * targets).sum(1)).mean())
            outer = (shares - targets) / (BATCH * MICROBATCHES)
            middle = outer @ weights[4] * (1 - two**2)
            inner = middle @ weights[2] * (1 - one**2)
            for place, (back, to) in enumerate(((inner, inputs), (middle, one), (outer, two))):
                gradients[2 * place] += back.T @ to
                gradients[2 * place + 1] += back.sum(0)
        norm, limit = np.sqrt(sum((each**2).sum() for each in gradients)), CLIPS["norm"]
        steps.append({"grad/norm": norm, "grad/norm_clipped": min(norm, limit)})
        steps[-1] |= {"clip/coef": min(1, limit / norm), "clip/clipped": int(norm > limit)}
        steps[-1] |= {"clip/threshold": limit, "train/step": len(steps)}
        for weight, speed, gradient in zip(weights, speeds, gradients, strict=True):
            speed *= 0.9
            speed += gradient * min(1, limit / norm)
            weight -= 0.3 * speed
    return steps, losses


@pytest.mark.parametrize("name", [*loops.LOOPS, "transformers"])
def test_every_library_has_the_rows_of_float64_by_hand_and_the_page_of_our_runs(name, tmp_path):
    file = tmp_path / "run" / "metrics.jsonl"
    torch.set_default_dtype(torch.float64)
    try:
        if name == "transformers":
            callback = ClippingCallback("norm", CLIPS["norm"], to=file)
            by_transformers(tmp_path / "theirs", callback, logging_strategy="steps")
        else:
            loops.LOOPS[name]("single", "norm", file)
        steps, losses = by_numpy()
    finally:
        torch.set_default_dtype(torch.float32)
    series = read_run(file.parent).series
    for key in steps[0]:
        assert series[key].values == pytest.approx([step[key] for step in steps], rel=1e-9), key
    # The loss of the last microbatch is what these loops give; transformers logs the step's own.
    whole = [np.mean(each) if name == "transformers" else each[-1] for each in losses]
    assert series["train/loss"].values == pytest.approx(whole, rel=1e-6)
    page, charts = write(file.parent).read_text(), figures(file.parent)
    assert set(charts) == {"loss", "norm-norm", "clipped-norm", "coef-norm", "histogram"}
    assert "python -m runner<" not in page  # no command of ours made this run
    assert f"it clipped {100 * np.mean([step['clip/clipped'] for step in steps]):.3g}" in page
    assert "threshold of norm 0.3" in [trace.name for trace in charts["norm-norm"].data]
