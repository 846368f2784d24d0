"""Scripts written for Colossal-AI and for Composer run with their import lines changed."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from runner.booster import SinglePlugin
from tests.compat import colossal as script
from tests.process import python
from tests.ranks import run_ranks

HERE = Path(__file__).resolve().parent
EPOCHS = 2


def test_composer():
    said = python(str(HERE / "composer.py")).stdout
    for kind in ("norm", "value", "adaptive"):
        first, second = map(float, re.findall(rf"{kind} epoch \d: ([\d.]+)", said))
        assert second < first, kind
    assert float(re.search(r"accuracy ([\d.]+)", said)[1]) > 0.5
    assert 0 < float(re.search(r"clipped ([\d.]+)", said)[1]) <= 1


def parts_of(batch):
    if isinstance(batch, dict):
        halves = {name: tensor.chunk(2) for name, tensor in batch.items()}
        return [{name: halves[name][rank] for name in halves} for rank in range(2)]
    return list(zip(*(tensor.chunk(2) for tensor in batch), strict=True))


def by_plain_torch(name, half):
    """Train one model by torch alone, on the samples that two ranks read together."""
    model = script.build_model(name)
    optimizer = torch.optim.AdamW(
        script.groups_of(model), lr=script.RATE, eps=script.EPS, fused=True
    )
    samples, _ = script.datasets(name)
    loader = SinglePlugin().prepare_dataloader(samples, script.BATCH, shuffle=True, drop_last=True)
    total = len(loader) * script.PLANNED
    if name == "bert":
        scheduler = script.warmed_up(optimizer, total)
    else:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    scaler = torch.amp.GradScaler("cpu", enabled=half)
    for _ in range(EPOCHS):
        for batch in loader:
            summed = {}
            for rank, part in enumerate(parts_of(batch)):
                buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16, enabled=half):
                    loss = script.loss_of(model, part, nn.functional.cross_entropy)
                scaler.scale(loss).backward()
                for key, parameter in model.named_parameters():
                    summed[key] = summed.get(key, 0) + parameter.grad / 2
                if rank:  # Running statistics are those of the first rank.
                    for key, buffer in model.named_buffers():
                        buffer.copy_(buffers[key])
            for key, parameter in model.named_parameters():
                parameter.grad = summed[key]
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), script.CLIP)
            assert not norm <= script.CLIP
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    return model, scaler.get_scale() if half else None


def require_plain_torchs(name, plugin, folder):
    """Compare the saved weights with plain torch's; return the loss on held-out samples."""
    half = plugin.endswith("fp16")
    plain, scale = by_plain_torch(name, half)
    weights = torch.load(folder / "end.pth", weights_only=True)
    expected = plain.state_dict()
    before = script.build_model(name).state_dict()
    assert weights.keys() == expected.keys()
    for key, tensor in expected.items():
        off = (weights[key] - tensor).abs().max()
        assert off <= 1e-6 * max(1.0, tensor.abs().max()), (name, key, off)
    assert any(not torch.equal(tensor, before[key]) for key, tensor in weights.items())
    if half:
        saved = torch.load(folder / f"{EPOCHS}" / "optimizer" / "optimizer.pt", weights_only=True)
        assert saved["loss_scale"]["scale"] == scale < 2.0**16, "a step has overflowed"
    samples = script.datasets(name)[1]
    plain.load_state_dict(weights)
    with torch.autocast("cpu", torch.float16, enabled=half):
        loss, _ = script.evaluate(plain, torch.utils.data.DataLoader(samples, len(samples)))
    return loss.item()


FP16 = ("bert", "torch_ddp_fp16")


def train_and_resume(folder):
    """Train for an epoch, go on in objects made anew, and return the evaluation."""
    script.train(*FP16, folder, 1)
    return script.train(*FP16, folder, EPOCHS, resume=1)


def test_a_training_of_colossal_resumes_as_plain_torch_goes_on(tmp_path):
    losses = run_ranks(train_and_resume, 2, tmp_path)
    assert losses == pytest.approx([require_plain_torchs(*FP16, tmp_path)] * 2, rel=1e-3)


def test_torchrun_starts_a_script_of_colossal(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = ["resnet", "low_level_zero", str(tmp_path)]
    done = python(*torchrun, str(HERE / "colossal.py"), *words)
    assert done.stderr.count("epoch 2: loss") == 1, "one rank says it"
    loss = require_plain_torchs("resnet", "low_level_zero", tmp_path)
    [said] = re.findall(r"resnet: loss on held-out samples ([\d.]+)", done.stdout)
    assert float(said) == pytest.approx(loss, abs=1e-4)
