"""A Trainer script in the style of Composer's gradient clipping example.

Written for Composer it differs in its first import lines.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from runner import Classifier as ComposerClassifier
from runner import GradientClipping, Trainer

if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.randn(128, 20)
    dataset = TensorDataset(inputs, (inputs @ torch.randn(20, 4)).argmax(-1))
    model = ComposerClassifier(
        module=torch.nn.Sequential(
            torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
        ),
        num_classes=4,
    )
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
