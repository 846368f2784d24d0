"""The steps that a plan announces, and that a calibration measures, are those of one process."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from runner.config.request import request
from runner.tools.calibrate import end_of
from runner.train import build

SAMPLES, BATCH, EPOCHS = 144, 8, 2

TEXT = [
    *("model=gpt", "model.layers=2", "model.heads=2", "model.width=16", "model.context=16"),
    *("data=synthetic", "data.kind=tokens", "data.sequence_length=8"),
    *(f"data.samples={SAMPLES}", "data.test_samples=8", f"data.batch_size={BATCH}"),
    *(f"train.max_duration={EPOCHS}ep", "device=cpu", "tracker=none"),
]
EXPERTS = ["model=moe", "model.layers=2", "model.heads=2", "model.width=16", "model.context=16"]
LAYOUTS = {
    "single": 1,
    "fsdp plugin.nproc=4 plugin.dp_replicate=2": 4,
    "tensor plugin.nproc=4 plugin.tp_size=2": 2,
    "pipeline plugin.nproc=4 plugin.pp_size=2": 2,
    "moe plugin.nproc=4 plugin.ep_size=2": 4,
    "hybrid plugin.nproc=8 plugin.tp_size=2 plugin.pp_size=2": 2,
}
"""Requests, and how many ranks of each read samples of their own."""


def steps_of_torch(data_size, *, drop_last=False, accumulation=1):
    """Steps of one process that reads the batches of all data-parallel ranks at once."""
    loader = DataLoader(TensorDataset(torch.zeros(SAMPLES)), BATCH * data_size, drop_last=drop_last)
    steps = 0
    for _ in range(EPOCHS):
        waiting = 0
        for number, _ in enumerate(loader, 1):
            waiting += 1
            if waiting == accumulation or number == len(loader):
                steps, waiting = steps + 1, 0
    return steps


@pytest.fixture(autouse=True)
def _no_gpu(outputs, monkeypatch):
    monkeypatch.setattr(build.torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "how", [{}, {"accumulation": 4}, {"drop_last": True, "accumulation": 4}], ids=str
)
def test_a_plan_counts_data_parallel_ranks_alone(layout, how):
    overrides = [*TEXT, *(EXPERTS if layout.startswith("moe") else []), *f"plugin={layout}".split()]
    overrides += [f"data.drop_last={'drop_last' in how}".lower()]
    overrides += [f"accumulation.steps={how.get('accumulation', 1)}"]
    (job,) = request(overrides).jobs
    expected = steps_of_torch(LAYOUTS[layout], **how)
    assert end_of(job.config).value == min(expected, job.config.calibrate.steps)
    data = build.make_data(job.config.data)
    assert build.steps_of(job.config, data) == expected
