"""Two scripts in one, in the style of Colossal-AI's examples: train, save, resume and evaluate.

A small ResNet and a BERT. Written for Colossal-AI they differ in their import lines and in how they
name devices.

    torchrun --standalone --nproc_per_node=2 tests/compat/colossal.py resnet torch_ddp checkpoints
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchvision import transforms
from torchvision.datasets import FakeData

import runner
from runner import (
    Booster,
    CosineAnnealingLR,
    DistCoordinator,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    get_current_device,
    get_dist_logger,
)

RATE = 1e-3
CLIP = 0.1
EPS = 1e-4  # with a small one, Adam amplifies the rounding of clipped gradients
BATCH = 20  # samples of one step, over all ranks
PLANNED = 6  # epochs of the schedule
SAVED = {
    "resnet": ("model", {"shard": True, "size_per_shard": 64}),
    "bert": ("model.safetensors", {"use_safetensors": True}),
}


def datasets(name):
    if name == "bert":
        drawn = torch.Generator().manual_seed(1)
        tokens = torch.randint(32, (80, 20), generator=drawn)
        pairs = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]
        return pairs[:60], pairs[60:]
    prepare = transforms.ToTensor()
    return [FakeData(count, (3, 32, 32), 10, prepare, None, count) for count in (60, 20)]


def build_model(name):
    torch.manual_seed(7)
    if name == "resnet":
        from torchvision.models.resnet import BasicBlock, ResNet

        return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_labels": 2}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **layers, **dropout))


def groups_of(model):
    """Decay everything but biases and the weights of layer norms."""
    free = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    decayed = [p for name, p in named if not name.endswith(free)]
    undecayed = [p for name, p in named if name.endswith(free)]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": undecayed, "weight_decay": 0.0}]


def loss_of(model, batch, criterion):
    if isinstance(batch, dict):
        return 30 * model(**batch)[0]  # under fp16 the first gradients overflow
    return criterion(model(batch[0].to(get_current_device())), batch[1])


def warmed_up(optimizer, total):
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, total // PLANNED, total)


@torch.no_grad()
def evaluate(model, loader):
    """Return the sum of the losses of all batches, and their number."""
    model.eval()
    losses = [loss_of(model, batch, nn.functional.cross_entropy) for batch in loader]
    return torch.tensor([sum(losses), len(losses)])


def train(name, plugin, at, epochs, resume=0):
    coordinator = DistCoordinator()
    logger = get_dist_logger()
    precision = "fp16" if plugin.endswith("fp16") else None
    zero = plugin == "low_level_zero"
    plugin = LowLevelZeroPlugin(initial_scale=2**5) if zero else TorchDDPPlugin()
    booster = Booster(plugin=plugin, mixed_precision=precision)
    with coordinator.priority_execution():
        train_set, test_set = datasets(name)
    batch_size = BATCH // coordinator.world_size
    train_loader = plugin.prepare_train_dataloader(
        train_set, batch_size=batch_size, shuffle=True, drop_last=True
    )
    model = build_model(name).to(get_current_device())
    optimizer = torch.optim.AdamW(groups_of(model), lr=RATE, eps=EPS, fused=True)
    total = len(train_loader) * PLANNED
    if name == "bert":
        scheduler = warmed_up(optimizer, total)
    else:
        scheduler = CosineAnnealingLR(optimizer, total_steps=total)
    model, optimizer, criterion, train_loader, scheduler = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), train_loader, lr_scheduler=scheduler
    )
    file, options = SAVED[name]
    if resume:
        booster.load_model(model, at / f"{resume}" / file)
        booster.load_optimizer(optimizer, at / f"{resume}" / "optimizer")
        booster.load_lr_scheduler(scheduler, at / f"{resume}" / "scheduler.pth")
    for epoch in range(resume + 1, epochs + 1):
        model.train()
        for batch in train_loader:
            loss = loss_of(model, batch, criterion)
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        booster.save_model(model, at / f"{epoch}" / file, **options)
        booster.save_optimizer(optimizer, at / f"{epoch}" / "optimizer", shard=name == "resnet")
        booster.save_lr_scheduler(scheduler, at / f"{epoch}" / "scheduler.pth")
        logger.info(f"epoch {epoch}: loss {loss.item():.4f}", ranks=[0])
    booster.save_model(model, at / "end.pth")
    losses = evaluate(model, plugin.prepare_dataloader(test_set, batch_size=batch_size))
    dist.all_reduce(losses)
    coordinator.print_on_master(f"{name}: loss on held-out samples {losses[0] / losses[1]:.4f}")
    return (losses[0] / losses[1]).item()


if __name__ == "__main__":
    runner.launch_from_torch(seed=42)
    train(sys.argv[1], sys.argv[2], Path(sys.argv[3]), 2)
