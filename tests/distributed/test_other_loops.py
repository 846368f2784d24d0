"""Loops of PyTorch, Lightning Fabric, Accelerate and transformers clip as this Trainer does."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from runner import ClippingCallback, GradientClipping, Trainer
from tests.distributed import loops
from tests.distributed.loops import BATCH, CLIPS, MICROBATCHES, STEPS, make_data, make_net
from tests.ranks import run_ranks

# Lightning says at import that Slurm's srun is not used; where to log is transformers' own affair.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The `srun` command"),
]


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


def norms_by_hand(mode):
    """‖G‖ of each step by PyTorch alone; the norm mode's own clipping stands in for the others."""
    net = make_net()
    optimizer = loops.make_optimizer(net)
    norms = []
    for number, (inputs, targets) in enumerate(loops.microbatches(), 1):
        (cross_entropy(net(inputs), targets) / MICROBATCHES).backward()
        if number % MICROBATCHES == 0:
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), CLIPS[mode])))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def far(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def require_same(weights, mode):
    wanted = by_trainer(mode)
    assert weights.keys() == wanted.keys()
    assert far(weights, wanted) < 1e-6
    assert far(weights, by_trainer(None)) > 0.1  # without clipping they are others


def require_rows(rows):
    assert [row["train/step"] for row in rows] == [*range(1, STEPS + 1)]
    assert [row["grad/norm"] for row in rows] == pytest.approx(norms_by_hand("norm"), rel=1e-5)
    clipped = [min(row["grad/norm"], CLIPS["norm"]) for row in rows]
    assert [row["grad/norm_clipped"] for row in rows] == pytest.approx(clipped, rel=1e-5)


def run_alone(name):
    for mode in CLIPS:
        rows = []
        require_same(loops.LOOPS[name]("single", mode, rows.append), mode)
        if mode == "norm":
            require_rows(rows)


def run_on_two_ranks(name):
    first, second = run_ranks(loops.on_ranks, 2, name, ["ddp", "fsdp"])
    for (kind, mode), (weights, rows) in first.items():
        require_same(weights, mode)
        others, no_rows = second[kind, mode]
        assert all(torch.equal(weights[key], others[key]) for key in weights)
        assert not no_rows
        if mode == "norm":
            require_rows(rows)


def test_a_bare_loop():
    run_alone("bare")


def test_a_bare_loop_under_ddp_and_fsdp2():
    run_on_two_ranks("bare")


@pytest.mark.parametrize("name", ["fabric", "accelerate"])
def test_fabric_and_accelerate(name):
    run_alone(name)


@pytest.mark.parametrize("name", ["accelerate", "fabric"])
def test_fabric_and_accelerate_under_ddp_and_fsdp2(name):
    run_on_two_ranks(name)


# -- transformers


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs, labels):
        outputs = self.net(inputs)
        return {"loss": cross_entropy(outputs, labels), "logits": outputs}


def transformers_trainer(folder, net, callback, **arguments):
    from transformers import Trainer as Theirs
    from transformers import TrainingArguments

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
        logging_strategy="no",
        disable_tqdm=True,
        **arguments,
    )
    return Theirs(
        WithLoss(net),
        arguments,
        train_dataset=[{"inputs": inputs, "labels": label} for inputs, label in make_data()],
        optimizers=(loops.make_optimizer(net), None),
        callbacks=[callback],
    )


def test_the_trainer_of_transformers(tmp_path):
    for mode, threshold in CLIPS.items():
        net, rows = make_net(), []
        callback = ClippingCallback(mode, threshold, to=rows.append)
        transformers_trainer(tmp_path, net, callback, max_grad_norm=0).train()
        require_same(loops.whole(net), mode)
        if mode == "norm":
            require_rows(rows)
    with pytest.raises(ValueError, match=r"max_grad_norm=1 clips .* TrainingArguments\(max_grad_n"):
        transformers_trainer(tmp_path, make_net(), ClippingCallback("norm", 0.1), max_grad_norm=1)
    net, rows = make_net(), []
    transformers_trainer(tmp_path, net, ClippingCallback(to=rows.append), max_grad_norm=0).train()
    assert far(loops.whole(net), by_trainer(None)) < 1e-6  # recorded, not clipped
    assert [row["clip/clipped"] for row in rows] == [0] * STEPS
