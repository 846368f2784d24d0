"""Two scripts in one, in the style of Composer's examples: only their import lines differ."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import runner as cf
from runner import Classifier as ComposerClassifier
from runner import GradientClipping, Trainer


def network():
    return torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


torch.manual_seed(0)
inputs = torch.randn(128, 20)
dataset = TensorDataset(inputs, (inputs @ torch.randn(20, 4)).argmax(-1))
for kind, threshold in [("norm", 0.1), ("value", 0.01), ("adaptive", 0.01)]:
    model = network()
    opt = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        for X, y in DataLoader(dataset, 16):
            loss = F.cross_entropy(model(X), y)
            loss.backward()
            cf.apply_gradient_clipping(
                model.parameters(), clipping_type=kind, clipping_threshold=threshold
            )
            opt.step()
            opt.zero_grad()
        print(f"{kind} epoch {epoch}: {loss.item():.4f}")

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
