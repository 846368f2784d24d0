"""Two scripts in one, in the style of Composer's examples of gradient clipping.

Written for Composer they differ in their import lines.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import runner as cf
from runner import Classifier as ComposerClassifier
from runner import GradientClipping, Trainer


def network():
    return torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


def training_loop(model, train_loader, clipping_type, clipping_threshold):
    opt = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        for X, y in train_loader:
            loss = F.cross_entropy(model(X), y)
            loss.backward()
            cf.apply_gradient_clipping(
                model.parameters(),
                clipping_type=clipping_type,
                clipping_threshold=clipping_threshold,
            )
            opt.step()
            opt.zero_grad()
        print(f"{clipping_type} epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.randn(128, 20)
    dataset = TensorDataset(inputs, (inputs @ torch.randn(20, 4)).argmax(-1))
    for kind, threshold in [("norm", 0.1), ("value", 0.01), ("adaptive", 0.01)]:
        training_loop(network(), DataLoader(dataset, 16), kind, threshold)

    model = ComposerClassifier(module=network(), num_classes=4)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(dataset, batch_size=16, shuffle=True),
        eval_dataloader=DataLoader(dataset, batch_size=16),
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        max_duration="5ep",
        algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=0.1)],
    )
    summary = trainer.fit()
    print(f"accuracy {summary['final']['eval/accuracy']:.3f}")
    print(f"clipped {summary['clip/ratio_total']:.3f}")
