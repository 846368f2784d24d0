"""Trainings by the Trainer under a plugin, and by plain PyTorch in one process."""

import torch

from runner import Booster, GradientClipping, Log, Trainer
from tests.distributed.training import Rows

THRESHOLD = 0.5


def fit(plugin, model, loader, steps, **options):
    """Train by the Trainer; return the weights of the whole model, rows, and number of samples."""
    rows = Rows()
    trainer = Trainer(
        model,
        loader,
        f"{steps}ba",
        GradientClipping("norm", THRESHOLD),
        booster=Booster(plugin=plugin),
        log=Log([rows]),
        **options,
    )
    summary = trainer.fit()
    return trainer.booster.state_dict(trainer.model), rows.rows, summary["samples"]


def step_by_torch(model, losses, *stepped):
    """Step optimizers and schedulers for each loss; return the losses, and ‖G‖ of each step."""
    steps = []
    for loss in losses:
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
        for gradient in gradients:  # torch's own clipping adds 1e-6 to the norm
            gradient.mul_(min(1.0, THRESHOLD / norm))
        for stepper in stepped:
            stepper.step()
        model.zero_grad()
        steps.append((loss.item(), norm))
    return steps
