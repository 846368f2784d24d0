"""Scripts written for Colossal-AI and for Composer run with their import lines changed."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from runner.booster import SinglePlugin
from tests.compat import colossal_examples as script
from tests.process import python
from tests.ranks import run_ranks

HERE = Path(__file__).resolve().parent
EPOCHS = 2


def run(name, *words, torchrun=()):
    done = python(*torchrun, str(HERE / f"{name}.py"), *words, timeout=300)
    return done.stdout + done.stderr


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_colossal_booster(precision, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    said = run("colossal_booster", precision, torchrun=torchrun)
    steps = re.findall(r"iteration (\d) loss [\d.]+ norm (\S+)", said)
    assert [int(index) for index, _ in steps] == [0, 1, 2, 3], "one rank says it"
    # Under fp16 the first steps may overflow: they say inf or nan, and are skipped.
    assert not any(float(norm) <= 0.1 for _, norm in steps)
    assert precision == "fp16" or all(math.isfinite(float(norm)) for _, norm in steps)
    sums = re.findall(r"rank \d weights (\S+)", said)
    assert len(sums) == 2
    assert len(set(sums)) == 1, "replicas drifted apart"


def test_composer():
    said = run("composer_functional")
    for kind in ("norm", "value", "adaptive"):
        first, second = map(float, re.findall(rf"{kind} epoch \d: ([\d.]+)", said))
        assert second < first
    said = run("composer_trainer")
    assert float(re.search(r"accuracy ([\d.]+)", said)[1]) > 0.5
    assert 0 < float(re.search(r"clipped ([\d.]+)", said)[1]) <= 1


def parts_of(batch, ranks):
    """What each rank reads of a batch."""
    if isinstance(batch, dict):
        held = {name: tensor.chunk(ranks) for name, tensor in batch.items()}
        return [{name: held[name][rank] for name in held} for rank in range(ranks)]
    return list(zip(*(tensor.chunk(ranks) for tensor in batch), strict=True))


def by_plain_torch(name, ranks, half):
    """Train one model by torch alone, on the samples that the ranks read together."""
    model = script.build_model(name)
    groups = script.groups_of(model)
    optimizer = torch.optim.AdamW(groups, lr=script.RATE * ranks, fused=True)
    loader = SinglePlugin().prepare_dataloader(
        script.datasets(name)[0], script.BATCH, shuffle=True, drop_last=True
    )
    if name == "vit":  # half the rate for an epoch, then a line from the whole rate to 0
        left = script.PLANNED - 1
        scheduler = LambdaLR(optimizer, lambda n: (script.PLANNED - n) / left if n else 0.5)
    else:
        scheduler = script.build_scheduler(name, optimizer, len(loader))
    scaler = torch.amp.GradScaler("cpu", enabled=half)
    for _ in range(EPOCHS):
        for batch in loader:
            summed = {}
            for rank, part in enumerate(parts_of(batch, ranks)):
                buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16, enabled=half):
                    if isinstance(part, dict):
                        loss = model(**part).loss
                    else:
                        loss = nn.functional.cross_entropy(model(part[0]), part[1])
                scaler.scale(loss).backward()
                for key, parameter in model.named_parameters():
                    summed[key] = summed.get(key, 0) + parameter.grad / ranks
                if rank:  # Running statistics are those of the first rank.
                    for key, buffer in model.named_buffers():
                        buffer.copy_(buffers[key])
            for key, parameter in model.named_parameters():
                parameter.grad = summed[key]
            scaler.step(optimizer)
            scaler.update()
            if name == "bert":
                scheduler.step()
        if name != "bert":
            scheduler.step()
    return model, scaler.get_scale() if half else None


def train_and_resume(cases, folder):
    """Accuracies of trainings that stop after an epoch and go on in objects made anew."""
    found = []
    for name, plugin in cases:
        script.train(name, plugin, 1, at=folder / name)
        found.append(script.train(name, plugin, EPOCHS, resume=1, at=folder / name))
    return found


GATE = [("resnet", "torch_ddp"), ("vit", "low_level_zero"), ("bert", "torch_ddp_fp16")]
MORE = [("resnet", "low_level_zero"), ("vit", "torch_ddp_fp16"), ("bert", "low_level_zero")]


@pytest.mark.parametrize("cases", [GATE, pytest.param(MORE, marks=pytest.mark.slow)])
def test_colossal_examples_train_save_resume_and_evaluate_as_plain_torch(cases, tmp_path):
    ranks = run_ranks(train_and_resume, 2, cases, tmp_path, timeout=350)
    for (name, plugin), *accuracies in zip(cases, *ranks, strict=True):
        half = plugin.endswith("fp16")
        plain, scale = by_plain_torch(name, 2, half)
        weights = torch.load(tmp_path / name / "end.pth", weights_only=True)
        wanted, before = plain.state_dict(), script.build_model(name).state_dict()
        assert weights.keys() == wanted.keys()
        for key, tensor in wanted.items():
            off = (weights[key] - tensor).abs().max()
            assert off <= 1e-6 * max(1.0, tensor.abs().max()), (name, key, off)
        assert any(not torch.equal(tensor, before[key]) for key, tensor in weights.items())
        if half and name != "vit":
            saved = torch.load(tmp_path / name / f"{EPOCHS}" / "optimizer", weights_only=True)
            assert saved["loss_scale"]["scale"] == scale
        samples = script.datasets(name)[1]
        [batch] = torch.utils.data.DataLoader(samples, len(samples))
        plain.load_state_dict(weights)
        plain.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=half):
            found = plain(**batch).logits if name == "bert" else plain(batch[0])
        labels = batch["labels"] if name == "bert" else batch[1]
        accuracy = (found.argmax(1) == labels).double().mean().item()
        assert accuracies == pytest.approx([accuracy] * 2, abs=1e-6)
