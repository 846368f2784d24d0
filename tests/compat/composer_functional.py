"""A training loop in the style of Composer's functional gradient clipping.

Written for Composer it differs in one import line.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import runner as cf

CLIPPING = [("norm", 0.1), ("value", 0.01), ("adaptive", 0.01)]


def training_loop(model, train_loader, clipping_type, clipping_threshold):
    opt = torch.optim.Adam(model.parameters())
    loss_fn = F.cross_entropy
    model.train()
    for epoch in range(2):
        for X, y in train_loader:
            y_hat = model(X)
            loss = loss_fn(y_hat, y)
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
    data = TensorDataset(torch.randn(64, 20), torch.randint(4, (64,)))
    for kind, threshold in CLIPPING:
        network = torch.nn.Sequential(
            torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
        )
        training_loop(network, DataLoader(data, 16), kind, threshold)
