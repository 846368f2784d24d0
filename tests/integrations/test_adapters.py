"""Adapters: what they refuse, what resumes, the examples of their README."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import runner
from runner import GradientMonitor, LightningClipping, apply_gradient_clipping
from runner.integrations.accelerate import clip_gradients as accelerate_clip
from runner.integrations.fabric import clip_gradients as fabric_clip
from runner.run_folder.strict_json import read_rows
from tests.distributed.test_other_loops import by_lightning, by_trainer, far, make_data, make_net

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The `srun` command"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]


once = pytest.mark.xdist_group("resumed by Lightning")  # it trains once


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Weights and rows of a whole training of Lightning, and of one that resumes in it."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    tmp_path = tmp_path_factory.mktemp("lightning")

    def run(**more):
        file = tmp_path / "metrics.jsonl"
        clipping = LightningClipping("percentile", 40.0, min_steps=2, to=file)
        saves = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=6, save_top_k=-1)
        weights = by_lightning("single", clipping, callbacks=[clipping, saves], **more)
        timed = ("time/step_s", "throughput/samples_per_s")
        return weights, [
            {k: v for k, v in row.items() if k not in timed} for row in read_rows(file)
        ]

    options = {"max_epochs": 2, "enable_checkpointing": True, "default_root_dir": tmp_path}
    whole = run(**options)
    return whole, run(ckpt_path=tmp_path / "saved" / "step=6.ckpt", **options)


@once
def test_a_training_of_lightning_resumes_with_the_history(resumed):
    (weights, rows), (again, _) = resumed
    assert 0 < rows[-2]["clip/ratio_total"] < 1
    assert all(torch.equal(again[name], weights[name]) for name in weights)


@once
def test_a_training_of_lightning_that_resumes_writes_each_step_once(resumed):
    (_, rows), (_, rows_again) = resumed
    assert rows_again == rows


def test_the_hook_of_lightning_may_call_ours():
    def hook(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        apply_gradient_clipping(self.trainer.model, "adaptive", 0.05)

    assert far(by_lightning("single", None, hook=hook), by_trainer("adaptive")) < 1e-6


def test_lightning_that_clips_twice_is_refused():
    clipping = LightningClipping("norm", 0.3)
    with pytest.raises(ValueError, match=r"gradient_clip_val=1\) clips after this callback"):
        by_lightning("single", clipping, gradient_clip_val=1.0)
    with pytest.raises(ValueError, match=r"Module\.configure_gradient_clipping clips after"):
        by_lightning("single", clipping, hook=lambda *_, **__: None)


class Named:
    """Something that has a name and attributes."""

    def __init__(self, **attributes):
        self.__dict__ |= attributes


class DeepSpeedStrategy(Named):
    """A stand-in for Lightning's."""


def test_libraries_whose_engine_clips_are_refused():
    model = make_net()
    with pytest.raises(NotImplementedError, match="set gradient_clipping of DeepSpeedStrategy"):
        fabric_clip(Named(strategy=DeepSpeedStrategy()), model, None, "norm", 1.0)
    for kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        with pytest.raises(NotImplementedError, match="clip"):
            accelerate_clip(Named(distributed_type=kind), model, "norm", 1.0)


def test_the_examples_of_the_adapters_run(tmp_path, monkeypatch):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch):
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monkeypatch.chdir(tmp_path)
    text = (Path(runner.__file__).parent / "integrations" / "README.md").read_text()
    section = text.partition("## Adapters\n")[2].partition("\n## ")[0]
    examples = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(examples) == 4
    ran = []
    for example in examples:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = DataLoader(make_data(), 8)
        names = {"module": Module(), "loader": loader, "model_parts": [net], "pp_mesh": None}
        if "accelerator" in example:
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            prepared = accelerator.prepare(net, optimizer, loader)
            names["accelerator"] = accelerator
        elif "fabric." in example:
            fabric = Fabric(accelerator="cpu", devices=1)
            prepared = *fabric.setup(net, optimizer), loader
            names["fabric"] = fabric
        else:
            net(torch.ones(2, 6)).sum().backward()
            prepared = net, optimizer, loader
        names |= dict(zip(("model", "optimizer", "loader"), prepared, strict=True))
        names |= {"cross_entropy": cross_entropy}
        names |= {"monitor": GradientMonitor(names["model"], ran.append)}
        exec(compile(example, "README.md", "exec"), names)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert len(ran) == 6 + 3  # of Fabric, and of Accelerate with windows of two
    assert len([*read_rows(tmp_path / "metrics.jsonl")]) == 6
    assert float(names["norm"]) > 0
