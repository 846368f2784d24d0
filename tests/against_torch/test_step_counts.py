"""The steps that a plan announces, and that a calibration measures, are those of one process."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from runner.calibrate.calibrate import end_of
from runner.request.request import request
from runner.train import build

SAMPLES, BATCH, EPOCHS = 144, 8, 2

TEXT = [
    *("model.layers=2", "model.heads=2", "model.width=16", "model.context=16"),
    *("data=synthetic", "data.kind=tokens", "data.sequence_length=8", f"data.samples={SAMPLES}"),
    *("data.test_samples=8", f"data.batch_size={BATCH}", "device=cpu", "tracker=none"),
    f"train.max_duration={EPOCHS}ep",
]
LAYOUTS = {
    "model=gpt plugin=single": 1,
    "model=gpt plugin=fsdp plugin.nproc=4 plugin.dp_replicate=2": 4,
    "model=gpt plugin=tensor plugin.nproc=4 plugin.tp_size=2": 2,
    "model=gpt plugin=pipeline plugin.nproc=4 plugin.pp_size=2": 2,
    "model=moe plugin=moe plugin.nproc=4 plugin.ep_size=2": 4,
    "model=gpt plugin=hybrid plugin.nproc=8 plugin.tp_size=2 plugin.pp_size=2": 2,
}
"""Requests, and how many ranks of each read samples of their own."""


def steps_of_torch(data_size, drop_last, accumulation):
    """Steps of one process that reads the batches of all data-parallel ranks at once."""
    data = TensorDataset(torch.zeros(SAMPLES))
    batches = len(DataLoader(data, BATCH * data_size, drop_last=drop_last))
    return EPOCHS * -(-batches // accumulation)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("drop_last", "accumulation"), [(False, 1), (False, 4), (True, 4)])
def test_a_plan_counts_data_parallel_ranks_alone(
    layout, drop_last, accumulation, outputs, monkeypatch
):
    monkeypatch.setattr(build.torch.cuda, "device_count", lambda: 0)
    how = [f"data.drop_last={drop_last}".lower(), f"accumulation.steps={accumulation}"]
    (job,) = request([*layout.split(), *TEXT, *how]).jobs
    expected = steps_of_torch(LAYOUTS[layout], drop_last, accumulation)
    assert end_of(job.config).value == min(expected, job.config.calibrate.steps)
    data = build.make_data(job.config.data)
    assert build.steps_of(job.config, data) == expected
