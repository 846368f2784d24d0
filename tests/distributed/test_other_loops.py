"""Loops of PyTorch, Lightning Fabric, Accelerate and transformers clip as this Trainer does."""

import os
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from runner import (
    Booster,
    ClippingCallback,
    GradientClipping,
    GradientMonitor,
    Trainer,
    apply_gradient_clipping,
)
from runner.integrations.accelerate import clip_gradients as accelerate_clip
from runner.integrations.fabric import clip_gradients as fabric_clip
from runner.report import figures, read_run, write
from runner.run_folder.strict_json import read_rows
from tests.ranks import run_ranks

# Lightning says at import that Slurm's srun is not used; where to log is transformers' own affair.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The `srun` command"),
    # What Lightning says of torch's trees, of few workers and of the default dictionary of logs.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]

CLIPS = {"norm": 0.3, "value": 0.02, "adaptive": 0.05}
"""Thresholds that clip in most steps."""

BATCH, MICROBATCHES, STEPS = 4, 2, 6
"""Samples of a microbatch over all ranks, microbatches of a step, and steps."""


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def make_data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * MICROBATCHES * STEPS, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (len(inputs),), generator=generator))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def microbatches(rank=0, world=1):
    """For each microbatch the share of a rank, and whether it is the last one of its step."""
    for number, (inputs, targets) in enumerate(DataLoader(make_data(), BATCH), 1):
        yield inputs[rank::world], targets[rank::world], number % MICROBATCHES == 0


def sharded(model):
    """What fully_shard makes of a model."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[2])
    return fully_shard(model)


def whole(model):
    """Whole weights by their own names, on every rank."""
    weights = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        weights[name] = full.detach().clone()
    return weights


def record_and_step(decision, optimizer, monitor, **measured):
    monitor.step(decision, **measured)
    optimizer.step()
    optimizer.zero_grad()


def bare(kind, mode, *to):
    """A loop of PyTorch alone; kind: single, ddp or fsdp."""
    rank, world = (0, 1) if kind == "single" else (dist.get_rank(), dist.get_world_size())
    net = make_net()
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        apply_gradient_clipping(net, mode, CLIPS[mode])  # what it keeps of it is not used
    apply_gradient_clipping(net, mode, CLIPS[mode])  # it warns once
    model = {"single": lambda m: m, "ddp": DistributedDataParallel, "fsdp": sharded}[kind](net)
    optimizer = make_optimizer(model)
    with GradientMonitor(model, *to) as monitor:
        for inputs, targets, last in microbatches(rank, world):
            if kind == "fsdp":
                model.set_requires_gradient_sync(last)
            with model.no_sync() if kind == "ddp" and not last else nullcontext():
                loss = cross_entropy(model(inputs), targets)
                (loss / MICROBATCHES).backward()
            if last:
                decision = apply_gradient_clipping(model, mode, CLIPS[mode])
                samples = BATCH * MICROBATCHES
                record_and_step(decision, optimizer, monitor, loss=loss, lr=0.3, samples=samples)
    return whole(net)


def fabric(kind, mode, *to):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    world = 1 if kind == "single" else _as_torchrun()
    strategies = {"single": "auto", "ddp": "ddp"}
    strategy = strategies.get(kind) or ModelParallelStrategy(lambda model, mesh: sharded(model))
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    net = make_net()
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(make_optimizer(model))
    with GradientMonitor(model, *to) as monitor:
        for inputs, targets, last in microbatches(fabric.global_rank, world):
            with fabric.no_backward_sync(model, enabled=not last and kind != "single"):
                loss = cross_entropy(model(inputs), targets)
                fabric.backward(loss / MICROBATCHES)
            if last:
                decision = fabric_clip(fabric, model, optimizer, mode, CLIPS[mode])
                record_and_step(decision, optimizer, monitor, loss=loss)
    return whole(net)


def accelerate(kind, mode, *to):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    world = 1 if kind == "single" else _as_torchrun()
    plugin = None
    if kind == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=MICROBATCHES, fsdp_plugin=plugin
    )
    net = make_net()
    loader = DataLoader(make_data(), BATCH // world)
    model, optimizer, loader = accelerator.prepare(net, make_optimizer(net), loader)
    with GradientMonitor(model, *to) as monitor:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                decision = accelerate_clip(accelerator, model, mode, CLIPS[mode])
                if decision is None:  # as Accelerate, which does not step either
                    continue
                record_and_step(decision, optimizer, monitor, loss=loss)
    AcceleratorState._reset_state(reset_partial_state=True)
    return whole(accelerator.unwrap_model(model))


def lightning(kind, mode, *to):
    from runner import LightningClipping  # which imports Lightning: other loops need not

    callback = LightningClipping(mode, CLIPS[mode], to=list(to))
    return by_lightning(kind, callback)


def by_lightning(kind, callback, ckpt_path=None, hook=None, **options):
    """Weights after the Trainer of Lightning, on each rank."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def configure_model(self):
            if kind == "fsdp":
                sharded(self.net)

        def training_step(self, batch):
            inputs, targets = batch
            return cross_entropy(self.net(inputs), targets)

        def configure_optimizers(self):
            return make_optimizer(self)

    if hook is not None:
        Module.configure_gradient_clipping = hook
    world = 1 if kind == "single" else _as_torchrun()
    strategies = {"ddp": DDPStrategy, "fsdp": ModelParallelStrategy}
    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategies[kind]() if kind in strategies else "auto",
        accumulate_grad_batches=MICROBATCHES,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **({"max_epochs": 1, "enable_checkpointing": False, "callbacks": callback} | options),
    )
    rank = dist.get_rank() if world > 1 else 0
    batches = [(inputs, targets) for inputs, targets, _ in microbatches(rank, world)]
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return whole(module.net)


def _as_torchrun():
    """Describe this rank by the variables of torchrun, which other libraries read."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nobody connects: the process group exists
        "TORCHELASTIC_RUN_ID": "tests",
        "GROUP_RANK": "0",
    }
    return world


LOOPS = {"bare": bare, "fabric": fabric, "accelerate": accelerate, "lightning": lightning}


def run_all(name, kinds):
    """Weights and rows of every mode, by kind and mode."""
    results = {}
    for kind in kinds:
        for mode in CLIPS:
            rows = []
            results[kind, mode] = LOOPS[name](kind, mode, rows.append), rows
    return results


@cache
def by_trainer(mode):
    """Weights after this project's own Trainer; mode None: without clipping."""
    net = make_net()
    Trainer(
        net,
        DataLoader(make_data(), BATCH),
        "1ep",
        GradientClipping(mode, CLIPS[mode]) if mode else (),
        optimizers=make_optimizer(net),
        accumulation_steps=MICROBATCHES,
    ).fit()
    return whole(net)


def far(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in second)


def require_same(weights, rows, mode):
    assert weights.keys() == by_trainer(mode).keys(), mode
    assert far(weights, by_trainer(mode)) < 1e-6, mode
    assert far(weights, by_trainer(None)) > 0.1, f"{mode}: without clipping they are others"
    if mode == "norm":
        for key in ("train/step", "grad/norm", "grad/norm_clipped"):
            expected = [step[key] for step in by_numpy()[0]]
            assert [row[key] for row in rows] == pytest.approx(expected, rel=1e-5), key


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_in_one_process_takes_the_steps_of_our_trainer(name):
    for (_, mode), (weights, rows) in run_all(name, ["single"]).items():
        require_same(weights, rows, mode)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_under_ddp_or_fsdp2_takes_the_steps_of_our_trainer(name):
    first, second = run_ranks(run_all, 2, name, ["ddp", "fsdp"])
    for (kind, mode), (weights, rows) in first.items():
        require_same(weights, rows, mode)
        weights_of_second, no_rows = second[kind, mode]
        assert all(torch.equal(weights[key], weights_of_second[key]) for key in weights), (
            kind,
            mode,
        )
        assert not no_rows, (kind, mode)


def steps_of_another_optimizer():
    """What steps that are not boosted do, by plugin: how far they move, or the refusal."""
    from runner import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

    plugins = [TorchDDPPlugin(), TorchFSDPPlugin(), LowLevelZeroPlugin(stage=3)]
    plan = {"0": "colwise", "2": "rowwise"}
    plugins.append(HybridParallelPlugin(tp_size=2, pp_size=1, tp_plan=plan))
    results = []
    for plugin in plugins:
        net = make_net()
        another = torch.optim.AdamW(net[2].parameters(), lr=0.1)
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(net, make_optimizer(net))
        booster.backward(model(torch.ones(4, 6)).square().sum(), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        before = whole(net)
        try:
            another.step()
        except RuntimeError as error:
            results.append(str(error))
        else:
            results.append(far(whole(net), before))
        optimizer.step()
    return results


def test_an_optimizer_that_was_not_boosted_moves_parameters_or_is_refused():
    for ddp, *refusals in run_ranks(steps_of_another_optimizer, 2):
        assert ddp > 0.01
        for refusal in refusals:
            assert "2.weight was replaced when the model was boosted" in refusal
            assert "booster.boost(model, [first, second])" in refusal


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs, labels):
        outputs = self.net(inputs)
        return {"loss": cross_entropy(outputs, labels), "logits": outputs}


def by_transformers(folder, callback, max_grad_norm=0, logging_strategy="no", resume=None, **more):
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
        logging_strategy=logging_strategy,
        logging_steps=1,
        disable_tqdm=True,
        max_grad_norm=max_grad_norm,
        **({"save_strategy": "no"} | more),
    )
    Theirs(
        WithLoss(net),
        arguments,
        train_dataset=[{"inputs": inputs, "labels": label} for inputs, label in make_data()],
        optimizers=(make_optimizer(net), None),
        callbacks=[callback],
    ).train(resume_from_checkpoint=resume)
    return whole(net)


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


HISTORIES = {
    "percentile": (40.0, {"min_steps": 2}),
    "zscore": (0.1, {"warmup_steps": 4}),
    "adagc": (0.9, {"warmup_steps": 2}),
}
"""Modes with a history that clip some of six steps: a threshold and options."""


@pytest.fixture(
    scope="module",
    params=[(mode, restores) for mode in HISTORIES for restores in (False, True)],
    ids=str,
)
def resumed(request, tmp_path_factory):
    """Weights and rows of a whole training of transformers, and of one that resumes in it."""
    mode, restores = request.param
    threshold, options = HISTORIES[mode]
    saves = {"save_strategy": "steps", "save_steps": 4, "logging_strategy": "steps"}
    folder = tmp_path_factory.mktemp("transformers")
    file = folder / "metrics.jsonl"

    def run(**more):
        callback = ClippingCallback(mode, threshold, to=file, **options)
        weights = by_transformers(folder, callback, **saves, **more)
        timed = ("time/step_s", "throughput/samples_per_s")
        rows = [{k: v for k, v in row.items() if k not in timed} for row in read_rows(file)]
        return weights, rows

    whole_run = run()
    again = run(resume=folder / "checkpoint-4", restore_callback_states_from_checkpoint=restores)
    return whole_run, again


once = pytest.mark.xdist_group("trainings of other loops")  # each trains once


@once
def test_a_training_of_transformers_resumes_with_the_history(resumed):
    (weights, rows), (again, _) = resumed
    assert 0 < rows[-2]["clip/ratio_total"] < 1
    assert all(torch.equal(again[name], weights[name]) for name in weights)


@once
def test_a_training_of_transformers_that_resumes_writes_each_step_once(resumed):
    (_, rows), (_, rows_again) = resumed
    assert rows_again == rows


def by_numpy():
    """Each step's metrics, and the losses of its microbatches, by NumPy in float64."""
    weights = [parameter.detach().numpy().copy() for parameter in make_net().parameters()]
    speeds = [np.zeros_like(weight) for weight in weights]
    every, labels = (tensor.numpy() for tensor in make_data().tensors)
    steps = []
    losses = []
    for first in range(0, len(every), BATCH * MICROBATCHES):
        gradients = [np.zeros_like(weight) for weight in weights]
        losses.append([])
        for batch in (slice(i, i + BATCH) for i in (first, first + BATCH)):
            inputs = every[batch]
            targets = np.eye(3)[labels[batch]]
            first_outputs = np.tanh(inputs @ weights[0].T + weights[1])
            two = np.tanh(first_outputs @ weights[2].T + weights[3])
            shares = np.exp(two @ weights[4].T + weights[5])
            shares /= shares.sum(1, keepdims=True)
            losses[-1].append(-np.log((shares * targets).sum(1)).mean())
            outer = (shares - targets) / (BATCH * MICROBATCHES)
            middle = outer @ weights[4] * (1 - two**2)
            inner = middle @ weights[2] * (1 - first_outputs**2)
            for place, (back, to) in enumerate(
                ((inner, inputs), (middle, first_outputs), (outer, two))
            ):
                gradients[2 * place] += back.T @ to
                gradients[2 * place + 1] += back.sum(0)
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        limit = CLIPS["norm"]
        steps.append({"grad/norm": norm, "grad/norm_clipped": min(norm, limit)})
        steps[-1] |= {"clip/coef": min(1, limit / norm), "clip/clipped": int(norm > limit)}
        steps[-1] |= {"clip/threshold": limit, "train/step": len(steps)}
        for weight, speed, gradient in zip(weights, speeds, gradients, strict=True):
            speed *= 0.9
            speed += gradient * min(1, limit / norm)
            weight -= 0.3 * speed
    return steps, losses


@pytest.fixture(scope="module", params=[*LOOPS, "transformers"])
def in_float64(request, tmp_path_factory):
    """The library, the file that it recorded, and steps and losses of the same by NumPy."""
    folder = tmp_path_factory.mktemp("library")
    file = folder / "run" / "metrics.jsonl"
    torch.set_default_dtype(torch.float64)
    try:
        if request.param == "transformers":
            callback = ClippingCallback("norm", CLIPS["norm"], to=file)
            by_transformers(folder / "theirs", callback, logging_strategy="steps")
        else:
            LOOPS[request.param]("single", "norm", file)
        return request.param, file, *by_numpy()
    finally:
        torch.set_default_dtype(torch.float32)


@once
def test_every_library_has_the_rows_of_float64_by_hand(in_float64):
    name, file, steps, losses = in_float64
    series = read_run(file.parent).series
    for key in steps[0]:
        assert series[key].values == pytest.approx([step[key] for step in steps], rel=1e-9), key
    # The loss of the last microbatch is what these loops give; Trainers log the step's own.
    whole_step = name in ("transformers", "lightning")
    expected = [np.mean(step) if whole_step else step[-1] for step in losses]
    assert series["train/loss"].values == pytest.approx(expected, rel=1e-6)


@once
def test_every_library_has_the_page_of_our_runs(in_float64):
    _, file, steps, _ = in_float64
    page = write(file.parent).read_text()
    charts = figures(file.parent)
    assert set(charts) == {"loss", "norm", "clipped", "coef", "histogram"}
    assert "python -m runner" not in page  # no command of ours made this run
    assert f"clipped {100 * np.mean([step['clip/clipped'] for step in steps]):.3g}" in page
    assert "threshold of norm 0.3" in [trace.name for trace in charts["norm"].data]
