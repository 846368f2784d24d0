"""A tiny BERT that finds sentences of one meaning, in the style of Colossal-AI's example.

The folder $DATA has ``vocab.txt``, and ``train.tsv`` and ``dev.tsv`` as GLUE's MRPC has them: a
label and two sentences a line, after a header. Written for Colossal-AI it differs in its import
lines and in how it names devices.

    DATA=folder torchrun --standalone --nproc_per_node=2 tests/compat/colossal_bert.py -p torch_ddp
"""

import argparse
import csv
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    get_linear_schedule_with_warmup,
)

import runner
from runner import (
    Booster,
    DistCoordinator,
    HybridAdam,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    get_current_device,
)

RATE = 2.4e-4
BATCH = 8  # pairs of one step, over all ranks
PLANNED = 3  # epochs of the schedule
DECAY = 0.01


class Pairs(Dataset):
    """Tokenized pairs of sentences, as dictionaries of tensors."""

    def __init__(self, folder, split):
        with open(folder / f"{split}.tsv", newline="") as file:
            labels, *sentences = zip(*list(csv.reader(file, delimiter="\t"))[1:], strict=True)
        tokenizer = BertTokenizer.from_pretrained(str(folder))
        options = {"max_length": 20, "padding": "max_length", "truncation": True}
        self.features = tokenizer(*map(list, sentences), return_tensors="pt", **options)
        self.labels = torch.tensor([int(label) for label in labels])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        held = {name: tensor[index] for name, tensor in self.features.items()}
        return held | {"labels": self.labels[index]}


def build_model():
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def groups_of(model):
    """Decay everything but biases and the weights of layer norms."""
    free = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    decayed = [p for name, p in named if not name.endswith(free)]
    others = [p for name, p in named if name.endswith(free)]
    return [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]


def build_booster(name):
    if name == "low_level_zero":
        plugin = LowLevelZeroPlugin(initial_scale=2**5)
    else:
        plugin = TorchDDPPlugin()
    options = {"mixed_precision": "fp16"} if name == "torch_ddp_fp16" else {}
    return Booster(plugin=plugin, **options)


def on_device(batch):
    return {name: tensor.to(get_current_device()) for name, tensor in batch.items()}


@torch.no_grad()
def evaluate(model, loader):
    """Return accuracy and F1 over the pairs of all ranks."""
    model.eval()
    counts = torch.zeros(4, dtype=torch.int64, device=get_current_device())
    for batch in map(on_device, loader):
        loss, logits = model(**batch)[:2]
        assert loss.isfinite()
        found, labels = logits.argmax(1).bool(), batch["labels"].bool()
        for at, each in enumerate((found & labels, found & ~labels, ~found & labels)):
            counts[at] += each.sum()
        counts[3] += len(labels)
    dist.all_reduce(counts)
    both, only_found, only_label, total = counts.tolist()
    f1 = 2 * both / max(1, 2 * both + only_found + only_label)
    return (total - only_found - only_label) / total, f1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", default="torch_ddp")
    parser.add_argument("-e", "--epochs", type=int, default=2)
    parser.add_argument("-r", "--resume", type=int, default=0)
    parser.add_argument("-c", "--checkpoint", type=Path, default=Path("checkpoint"))
    args = parser.parse_args()

    runner.launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    booster = build_booster(args.plugin)
    batch = BATCH // coordinator.world_size
    train_set, dev_set = (Pairs(Path(os.environ["DATA"]), split) for split in ("train", "dev"))
    train_loader = booster.plugin.prepare_dataloader(
        train_set, batch_size=batch, shuffle=True, drop_last=True
    )
    dev_loader = booster.plugin.prepare_dataloader(dev_set, batch_size=batch)

    model = build_model().to(get_current_device())
    optimizer = HybridAdam(groups_of(model), lr=RATE * coordinator.world_size, eps=1e-8)
    total = len(train_loader) * PLANNED
    scheduler = get_linear_schedule_with_warmup(optimizer, total // 10, total)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)

    at = args.checkpoint
    if args.resume:
        booster.load_model(model, at / f"model_{args.resume}.safetensors")
        booster.load_optimizer(optimizer, at / f"optimizer_{args.resume}.pth")
        booster.load_lr_scheduler(scheduler, at / f"scheduler_{args.resume}.pth")
    for epoch in range(args.resume + 1, args.epochs + 1):
        model.train()
        for batch in map(on_device, train_loader):
            loss = model(**batch)[0]
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        booster.save_model(model, at / f"model_{epoch}.safetensors", use_safetensors=True)
        booster.save_optimizer(optimizer, at / f"optimizer_{epoch}.pth")
        booster.save_lr_scheduler(scheduler, at / f"scheduler_{epoch}.pth")
        coordinator.print_on_master(f"epoch {epoch}: loss {loss.item():.4f}")
    accuracy, f1 = evaluate(model, dev_loader)
    coordinator.print_on_master(f"accuracy on the pairs: {accuracy:.4f}")
    coordinator.print_on_master(f"f1 {f1:.4f}")


if __name__ == "__main__":
    main()
