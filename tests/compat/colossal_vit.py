"""A tiny vision transformer on CIFAR-10, in the style of Colossal-AI's example.

It trains with a warm-up, saves sharded checkpoints, resumes and evaluates. Written for Colossal-AI
it differs in its import lines and in how it names devices.

    DATA=folder torchrun --standalone --nproc_per_node=2 tests/compat/colossal_vit.py -p torch_ddp
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torchvision import transforms

import runner
from runner import (
    Booster,
    DistCoordinator,
    HybridAdam,
    LinearWarmupLR,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    get_current_device,
)

RATE = 1e-3
BATCH = 20  # images of one step, over all ranks
WARMUP = 1  # epochs
PLANNED = 6  # epochs of the schedule
NORMALIZE = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def build_model():
    torch.manual_seed(7)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return VisionTransformer(num_classes=10, mlp_ratio=1.0, **shape)


def build_plugin(name):
    match name:
        case "torch_ddp" | "torch_ddp_fp16":
            return TorchDDPPlugin()
        case "low_level_zero":
            return LowLevelZeroPlugin(initial_scale=2**5)
    raise SystemExit(f"unknown plugin {name}")


def loaders(plugin, coordinator):
    folder = Path(os.environ.get("DATA", "data"))
    prepare = transforms.Compose([transforms.ToTensor(), NORMALIZE])
    with coordinator.priority_execution():
        train_set = torchvision.datasets.CIFAR10(folder, train=True, transform=prepare)
        test_set = torchvision.datasets.CIFAR10(folder, train=False, transform=prepare)
    batch = BATCH // coordinator.world_size
    train_loader = plugin.prepare_train_dataloader(
        train_set, batch_size=batch, shuffle=True, drop_last=True
    )
    return train_loader, plugin.prepare_dataloader(test_set, batch_size=batch)


def step(model, optimizer, criterion, booster, images, labels):
    device = get_current_device()
    outputs = model(images.to(device))
    loss = criterion(outputs, labels.to(device))
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def accuracy_of(model, loader):
    model.eval()
    device = get_current_device()
    right = torch.zeros(1, dtype=torch.int64, device=device)
    seen = torch.zeros(1, dtype=torch.int64, device=device)
    for images, labels in loader:
        right += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        seen += len(labels)
    dist.all_reduce(right)
    dist.all_reduce(seen)
    return right.item() / seen.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", default="torch_ddp")
    parser.add_argument("-e", "--epochs", type=int, default=2)
    parser.add_argument("-r", "--resume", type=int, default=0)
    parser.add_argument("-c", "--checkpoint", type=Path, default=Path("checkpoint"))
    args = parser.parse_args()

    runner.launch_from_torch()
    coordinator = DistCoordinator()
    plugin = build_plugin(args.plugin)
    precision = "fp16" if args.plugin.endswith("fp16") else None
    booster = Booster(plugin=plugin, mixed_precision=precision)
    train_loader, test_loader = loaders(plugin, coordinator)

    model = build_model().to(get_current_device())
    optimizer = HybridAdam(model.parameters(), lr=RATE * coordinator.world_size)
    scheduler = LinearWarmupLR(optimizer, PLANNED, WARMUP)
    model, optimizer, criterion, train_loader, scheduler = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), train_loader, scheduler
    )

    if args.resume:
        former = args.checkpoint / str(args.resume)
        booster.load_model(model, former / "model")
        booster.load_optimizer(optimizer, former / "optimizer")
        booster.load_lr_scheduler(scheduler, former / "scheduler.pt")
    for epoch in range(args.resume + 1, args.epochs + 1):
        model.train()
        for images, labels in train_loader:
            loss = step(model, optimizer, criterion, booster, images, labels)
        scheduler.step()
        at = args.checkpoint / str(epoch)
        booster.save_model(model, at / "model", shard=True, size_per_shard=64)
        booster.save_optimizer(optimizer, at / "optimizer", shard=True)
        booster.save_lr_scheduler(scheduler, at / "scheduler.pt")
        coordinator.print_on_master(f"epoch {epoch}: loss {loss:.4f}")
    booster.save_model(model, args.checkpoint / f"model_{args.epochs}.pth")
    accuracy = accuracy_of(model, test_loader)
    coordinator.print_on_master(f"accuracy on the test images: {accuracy:.4f}")


if __name__ == "__main__":
    main()
