"""Three scripts in one, in the style of Colossal-AI's examples: train, save, resume and evaluate.

A small ResNet, a vision transformer and a BERT. Written for Colossal-AI they differ in their import
lines and in how they name devices. Data has no augmentation, so that a test can repeat the steps.

    torchrun --standalone --nproc_per_node=2 tests/compat/colossal_examples.py resnet torch_ddp 2
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.datasets import FakeData
from torchvision.models.resnet import BasicBlock, ResNet
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

import runner
from runner import (
    Booster,
    DistCoordinator,
    LinearWarmupLR,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    get_current_device,
)

RATE = 1e-3
BATCH = 20  # samples of one step, over all ranks
PLANNED = 6  # epochs of the schedule
SAVED = {
    "resnet": ("model.pth", {}),
    "vit": ("model", {"shard": True, "size_per_shard": 64}),
    "bert": ("model.safetensors", {"use_safetensors": True}),
}


class Sentences(Dataset):
    """Tokens and labels as dictionaries of tensors."""

    def __init__(self, count, seed):
        drawn = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(32, (count, 20), generator=drawn)
        self.labels = torch.randint(2, (count,), generator=drawn)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def datasets(name):
    if name == "bert":
        return Sentences(60, 1), Sentences(20, 2)
    prepare = transforms.ToTensor()
    return [FakeData(count, (3, 32, 32), 10, prepare, None, count) for count in (60, 20)]


def build_model(name):
    torch.manual_seed(7)
    if name == "resnet":
        return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    if name == "vit":
        shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
        return VisionTransformer(num_classes=10, mlp_ratio=1.0, **shape)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_labels": 2}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **layers, **dropout))


def groups_of(model):
    """Decay everything but biases and the weights of layer norms."""
    free = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    decayed = [p for name, p in named if not name.endswith(free)]
    others = [p for name, p in named if name.endswith(free)]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]


def build_scheduler(name, optimizer, steps):
    if name == "bert":  # counts steps
        return get_linear_schedule_with_warmup(optimizer, steps, steps * PLANNED)
    if name == "vit":
        return LinearWarmupLR(optimizer, PLANNED, 1)
    return MultiStepLR(optimizer, milestones=[1, 4], gamma=1 / 3)


@torch.no_grad()
def evaluate(model, loader):
    """Return the accuracy over the samples of all ranks."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=get_current_device())
    for batch in loader:
        if isinstance(batch, dict):
            found, labels = model(**batch).logits.argmax(1), batch["labels"]
        else:
            found, labels = model(batch[0].to(get_current_device())).argmax(1), batch[1]
        counts += torch.tensor([(found == labels).sum(), len(labels)])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def train(name, plugin, epochs, resume=0, at=Path("checkpoint")):
    coordinator = DistCoordinator()
    precision = "fp16" if plugin.endswith("fp16") else None
    zero = plugin == "low_level_zero"
    plugin = LowLevelZeroPlugin(initial_scale=2**5) if zero else TorchDDPPlugin()
    booster = Booster(plugin=plugin, mixed_precision=precision)
    with coordinator.priority_execution():
        train_set, test_set = datasets(name)
    batch = BATCH // coordinator.world_size
    train_loader = plugin.prepare_train_dataloader(
        train_set, batch_size=batch, shuffle=True, drop_last=True
    )
    test_loader = plugin.prepare_dataloader(test_set, batch_size=batch)

    model = build_model(name).to(get_current_device())
    rate = RATE * coordinator.world_size
    optimizer = torch.optim.AdamW(groups_of(model), lr=rate, fused=True)
    scheduler = build_scheduler(name, optimizer, len(train_loader))
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
            if isinstance(batch, dict):
                loss = model(**batch)[0]
            else:
                loss = criterion(model(batch[0].to(get_current_device())), batch[1])
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if name == "bert":
                scheduler.step()
        if name != "bert":
            scheduler.step()
        booster.save_model(model, at / f"{epoch}" / file, **options)
        booster.save_optimizer(optimizer, at / f"{epoch}" / "optimizer", shard=name == "vit")
        booster.save_lr_scheduler(scheduler, at / f"{epoch}" / "scheduler.pth")
        coordinator.print_on_master(f"epoch {epoch}: loss {loss.item():.4f}")
    booster.save_model(model, at / "end.pth")
    accuracy = evaluate(model, test_loader)
    coordinator.print_on_master(f"accuracy {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    runner.launch_from_torch(seed=42)
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
