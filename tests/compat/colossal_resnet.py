"""A small ResNet on CIFAR-10, in the style of Colossal-AI's example: train, save, resume, evaluate.

Written for Colossal-AI it differs in its import lines and in how it names devices. It has no
augmentation, so that a test can repeat its steps.

    DATA=folder torchrun --standalone --nproc_per_node=2 tests/compat/colossal_resnet.py
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torchvision import transforms
from torchvision.models.resnet import BasicBlock, ResNet

import runner
from runner import (
    Booster,
    DistCoordinator,
    HybridAdam,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    get_current_device,
)

RATE = 1e-3
BATCH = 50  # images of one step, over all ranks


def build_model():
    torch.manual_seed(7)
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)


def plugin_and_booster(name):
    if name == "low_level_zero":
        plugin = LowLevelZeroPlugin(initial_scale=2**5)
    else:
        plugin = TorchDDPPlugin()
    if name.endswith("fp16"):
        return plugin, Booster(plugin=plugin, mixed_precision="fp16")
    return plugin, Booster(plugin=plugin)


def datasets(coordinator):
    folder = Path(os.environ.get("DATA", "data"))
    with coordinator.priority_execution():
        return [
            torchvision.datasets.CIFAR10(folder, train=train, transform=transforms.ToTensor())
            for train in (True, False)
        ]


def train_epoch(model, optimizer, criterion, loader, booster):
    model.train()
    for images, labels in loader:
        images, labels = images.to(get_current_device()), labels.to(get_current_device())
        loss = criterion(model(images), labels)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def accuracy_of(model, loader):
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=get_current_device())
    for images, labels in loader:
        images, labels = images.to(get_current_device()), labels.to(get_current_device())
        found = model(images).argmax(1)
        counts += torch.stack([(found == labels).sum(), torch.tensor(len(labels)).to(found)])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", default="torch_ddp")
    parser.add_argument("-e", "--epochs", type=int, default=2)
    parser.add_argument("-r", "--resume", type=int, default=0)
    parser.add_argument("-c", "--checkpoint", type=Path, default=Path("checkpoint"))
    args = parser.parse_args()

    runner.launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    plugin, booster = plugin_and_booster(args.plugin)
    train_set, test_set = datasets(coordinator)
    batch = BATCH // coordinator.world_size
    train_loader = plugin.prepare_dataloader(
        train_set, batch_size=batch, shuffle=True, drop_last=True
    )
    test_loader = plugin.prepare_dataloader(test_set, batch_size=batch)

    model = build_model().to(get_current_device())
    criterion = nn.CrossEntropyLoss()
    optimizer = HybridAdam(model.parameters(), lr=RATE * coordinator.world_size)
    scheduler = MultiStepLR(optimizer, milestones=[1, 4], gamma=1 / 3)
    model, optimizer, criterion, _, scheduler = booster.boost(
        model, optimizer, criterion=criterion, lr_scheduler=scheduler
    )

    at = args.checkpoint
    if args.resume:
        booster.load_model(model, at / f"model_{args.resume}.pth")
        booster.load_optimizer(optimizer, at / f"optimizer_{args.resume}.pth")
        booster.load_lr_scheduler(scheduler, at / f"scheduler_{args.resume}.pth")
    for epoch in range(args.resume + 1, args.epochs + 1):
        loss = train_epoch(model, optimizer, criterion, train_loader, booster)
        scheduler.step()
        booster.save_model(model, at / f"model_{epoch}.pth")
        booster.save_optimizer(optimizer, at / f"optimizer_{epoch}.pth")
        booster.save_lr_scheduler(scheduler, at / f"scheduler_{epoch}.pth")
        coordinator.print_on_master(f"epoch {epoch}: loss {loss:.4f}")
    accuracy = accuracy_of(model, test_loader)
    coordinator.print_on_master(f"accuracy on the test images: {accuracy:.4f}")


if __name__ == "__main__":
    main()
