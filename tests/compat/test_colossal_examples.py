"""Scripts in the style of Colossal-AI's examples train, save, resume and evaluate as plain PyTorch.

In a gate a few of them run in ranks that are forked, which costs a third of starting torchrun:

    python -m pytest -m slow tests/compat    # all of them under torchrun, with 1 and 2 ranks
"""

import importlib.util
import os
import pickle
import random
import re
import socket
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.optim import AdamW
from torchvision import transforms
from transformers import get_linear_schedule_with_warmup

from runner.booster import SinglePlugin
from tests.process import ROOT, python
from tests.ranks import run_ranks

HERE = Path(__file__).resolve().parent
EPOCHS = 2

PLUGINS = {
    "resnet": ("torch_ddp", "torch_ddp_fp16", "low_level_zero"),
    "vit": ("torch_ddp", "torch_ddp_fp16", "low_level_zero"),
    "bert": ("torch_ddp", "torch_ddp_fp16", "low_level_zero"),
}
CASES = [(name, plugin) for name, plugins in PLUGINS.items() for plugin in plugins]


@pytest.fixture
def folder(tmp_path):
    """Images in CIFAR-10's format and pairs of sentences in GLUE's, a little learnable."""
    rng = np.random.default_rng(0)
    images = tmp_path / "cifar-10-batches-py"
    images.mkdir()
    patterns = rng.integers(0, 128, (10, 3072))
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        labels = rng.integers(0, 10, 20)
        pixels = (patterns[labels] + rng.integers(0, 128, (20, 3072))).astype(np.uint8)
        (images / name).write_bytes(pickle.dumps({"data": pixels, "labels": labels.tolist()}))
    names = {"label_names": [str(number) for number in range(10)]}
    (images / "batches.meta").write_bytes(pickle.dumps(names))
    # The real files have checksums, which torchvision compares.
    hook = "import sys\nif 'torch.distributed.run' not in sys.orig_argv:\n    "
    hook += "import torchvision.datasets.cifar as c\n    c.check_integrity = lambda *a, **k: True\n"
    (tmp_path / "sitecustomize.py").write_text(hook)

    words = [f"word{number}" for number in range(27)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    draw = random.Random(0)
    for split, count in (("train", 32), ("dev", 21)):
        lines = ["Quality\t#1 String\t#2 String"]
        for _ in range(count):
            first, label = draw.sample(words, draw.randint(3, 8)), draw.randrange(2)
            second = draw.sample(first, len(first)) if label else draw.sample(words, 5)
            lines.append(f"{label}\t{' '.join(first)}\t{' '.join(second)}")
        (tmp_path / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path


def script(name):
    """The script as a module: its model, data set and settings."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"colossal_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sets(name, module, folder, monkeypatch):
    """The samples to train on and those to evaluate on."""
    if name == "bert":
        return module.Pairs(folder, "train"), module.Pairs(folder, "dev")
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_, **__: True)
    prepare = [transforms.ToTensor(), *([module.NORMALIZE] if name == "vit" else [])]
    return [
        torchvision.datasets.CIFAR10(folder, train=train, transform=transforms.Compose(prepare))
        for train in (True, False)
    ]


def parts_of(batch, ranks):
    """What each rank reads of a batch."""
    if isinstance(batch, dict):
        held = {name: tensor.chunk(ranks) for name, tensor in batch.items()}
        return [{name: held[name][rank] for name in held} for rank in range(ranks)]
    return list(zip(*(tensor.chunk(ranks) for tensor in batch), strict=True))


def loss_of(model, part):
    if isinstance(part, dict):
        return model(**part).loss
    return nn.functional.cross_entropy(model(part[0]), part[1])


def schedule(name, module, optimizer, steps):
    """The schedule, and whether it counts steps."""
    if name == "bert":
        total = steps * module.PLANNED
        return get_linear_schedule_with_warmup(optimizer, total // 10, total), True
    if name == "resnet":
        milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 4], gamma=1 / 3)
        return milestones, False
    # One epoch of warm-up with half the rate, then a line from the whole rate to 0.
    after = module.PLANNED - module.WARMUP
    line = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: 0.5 if epoch < 1 else (module.PLANNED - epoch) / after
    )
    return line, False


def by_plain_torch(name, module, samples, ranks, half):
    """Train one model by torch alone, on the samples that the ranks read together."""
    model = module.build_model()
    rate = module.RATE * ranks
    given = module.groups_of(model) if name == "bert" else model.parameters()
    optimizer = AdamW(given, lr=rate, eps=1e-8, weight_decay=0.0, fused=True)
    loader = SinglePlugin().prepare_dataloader(samples, module.BATCH, shuffle=True, drop_last=True)
    scheduler, each_step = schedule(name, module, optimizer, len(loader))
    scaler = torch.amp.GradScaler("cpu", enabled=half)
    for _ in range(EPOCHS):
        model.train()
        for batch in loader:
            gradients = None
            for rank, part in enumerate(parts_of(batch, ranks)):
                buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16, enabled=half):
                    loss = loss_of(model, part)
                scaler.scale(loss).backward()
                share = [parameter.grad / ranks for parameter in model.parameters()]
                gradients = (
                    share if rank == 0 else [a + b for a, b in zip(gradients, share, strict=True)]
                )
                if rank:  # Running statistics are those of the first rank.
                    for key, buffer in model.named_buffers():
                        buffer.copy_(buffers[key])
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            scaler.step(optimizer)
            scaler.update()
            if each_step:
                scheduler.step()
        if not each_step:
            scheduler.step()
    return model, scaler.get_scale() if half else None


@torch.no_grad()
def accuracy(model, samples, half):
    model.eval()
    [batch] = torch.utils.data.DataLoader(samples, len(samples))
    with torch.autocast("cpu", torch.float16, enabled=half):
        if isinstance(batch, dict):
            return (model(**batch).logits.argmax(1) == batch["labels"]).float().mean().item()
        return (model(batch[0]).argmax(1) == batch[1]).float().mean().item()


def by_torchrun(name, starts, ranks, folder):
    """What the ranks print under torchrun, which starts once for each list of arguments."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    here = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "DATA": str(folder)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    said = []
    for words in starts:
        command = [*torchrun, str(HERE / f"colossal_{name}.py"), *words]
        done = python(*command, env=os.environ | here, timeout=400)
        said.append(done.stdout + done.stderr)
    return said


def forked(name, starts, ranks, folder):
    """What forked ranks print, which run the script once for each list of arguments."""
    ports = []
    for _ in starts:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            ports.append(taken.getsockname()[1])
    printed = run_ranks(as_torchrun, ranks, name, starts, ports, folder)
    return ["".join(each) for each in zip(*printed, strict=True)]


def as_torchrun(name, starts, ports, folder):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torchvision.datasets.cifar.check_integrity = lambda *_, **__: True
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "DATA": str(folder)}
    printed = []
    for words, port in zip(starts, ports, strict=True):
        # A rank that left the former group while another one still joins it would stop that one.
        (folder / f"{port}-{rank}").touch()
        while not all((folder / f"{port}-{each}").exists() for each in range(ranks)):
            time.sleep(0.01)
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(port)
        sys.argv = [name, *words]
        with redirect_stdout(StringIO()) as said:
            script(name).main()
        printed.append(said.getvalue())
    return printed


def trains_saves_resumes_and_evaluates(start, name, plugin, ranks, folder, monkeypatch):
    kept = folder / "checkpoint"
    words = ["-p", plugin, "-c", str(kept)]
    starts = [*words, "-e", "1"], [*words, "-e", str(EPOCHS), "-r", "1"]
    _, said = start(name, starts, ranks, folder)
    assert said.count("accuracy") == 1, "one rank says it"

    half = plugin.endswith("fp16")
    module = script(name)
    train_set, test_set = sets(name, module, folder, monkeypatch)
    plain, scale = by_plain_torch(name, module, train_set, ranks, half)
    if name == "bert":
        weights = safetensors.torch.load_file(kept / f"model_{EPOCHS}.safetensors")
    else:
        weights = torch.load(kept / f"model_{EPOCHS}.pth", weights_only=True)
    wanted, before = plain.state_dict(), module.build_model().state_dict()
    assert weights.keys() == wanted.keys()
    for key, tensor in wanted.items():
        off = (weights[key] - tensor).abs().max()
        assert off <= 1e-6 * max(1.0, tensor.abs().max()), (key, off)
    moved = [key for key, tensor in weights.items() if not torch.equal(tensor, before[key])]
    assert moved, "no weight has changed"
    if half and name != "vit":
        state = torch.load(kept / f"optimizer_{EPOCHS}.pth", weights_only=True)
        assert state["loss_scale"]["scale"] == scale
    again = module.build_model()
    again.load_state_dict(weights)
    printed = float(re.search(r"accuracy on the \S+.*: ([\d.]+)", said)[1])
    assert printed == pytest.approx(accuracy(again, test_set, half), abs=1e-4)


# Convolutions in fp16 take a CPU minutes.
@pytest.mark.parametrize(("name", "plugin"), sorted({*CASES} - {("resnet", "torch_ddp_fp16")}))
@pytest.mark.product(every=5)
def test_forked(name, plugin, folder, monkeypatch):
    trains_saves_resumes_and_evaluates(forked, name, plugin, 2, folder, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("name", "plugin"), CASES)
def test_torchrun(name, plugin, ranks, folder, monkeypatch):
    trains_saves_resumes_and_evaluates(by_torchrun, name, plugin, ranks, folder, monkeypatch)
