"""A Booster script in the style of Colossal-AI's gradient clipping tutorial.

ResNet-18, SGD with a cosine schedule, clipping by norm 0.1, four iterations. Written for
Colossal-AI it differs in its first import lines and in moving tensors to the GPU.

    torchrun --standalone --nproc_per_node=2 tests/compat/colossal_booster.py [fp16]
"""

import os
import sys

import torch
from torch import nn
from torch.optim import SGD
from torchvision import transforms
from torchvision.datasets import FakeData
from torchvision.models import resnet18

from runner import Booster, CosineAnnealingLR, TorchDDPPlugin, get_dist_logger, launch_from_torch

CLIP = 0.1
ITERATIONS = 4


def main() -> None:
    launch_from_torch()
    logger = get_dist_logger()
    flip = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    train_set = FakeData(100, (3, 32, 32), 10, transform=flip)
    plugin = TorchDDPPlugin()
    precision = sys.argv[1] if len(sys.argv) > 1 else None
    booster = Booster(mixed_precision=precision, plugin=plugin)
    model = resnet18(num_classes=10)
    train_loader = plugin.prepare_dataloader(train_set, batch_size=8, shuffle=True, drop_last=True)
    criterion = nn.CrossEntropyLoss()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = CosineAnnealingLR(optimizer, total_steps=200)
    model, optimizer, criterion, train_loader, scheduler = booster.boost(
        model, optimizer, criterion, train_loader, scheduler
    )
    model.train()
    for index, (images, labels) in zip(range(ITERATIONS), train_loader, strict=False):
        model.zero_grad()
        loss = criterion(model(images), labels)
        booster.backward(loss, optimizer)
        norm = optimizer.clip_grad_by_norm(max_norm=CLIP)
        optimizer.step()
        scheduler.step()
        logger.info(f"iteration {index} loss {loss.item():.4f} norm {norm.item():.6f}", ranks=[0])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    # One write a line: both ranks share the pipe, and print() may send the end of line apart.
    line = f"rank {os.environ['RANK']} weights {weights.double().sum().item():.12e}\n"
    os.write(1, line.encode())


if __name__ == "__main__":
    main()
