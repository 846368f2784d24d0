"""``accumulation=auto``: the fewest microbatches that fit, found before the run."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runner.cli.main import main
from runner.launch import fitting, supervise
from runner.launch.failure import Failure
from runner.train import preflight
from tests.kept import assert_same_checkpoint
from tests.launch.ends import read, rows_of

MOST = 4  # samples that the second rank has memory for
WORDS = ["plugin=ddp", "plugin.nproc=2", "data=synthetic", "data.samples=96", "device=cpu"]
WORDS += ["tracker=none", "eval.interval=1ep", "checkpoint.interval=2ba"]
WORDS += ["model=tests.launch.test_fitting.Small", "optimizer=adamw", "scheduler=constant"]
TIMES = ("time/step_s", "throughput/samples_per_s")


class Small(nn.Module):
    """Runs out of memory on the second rank as a device does, and draws random numbers."""

    def __init__(self):
        super().__init__()
        head = nn.Linear(64, 10)
        self.layers = nn.Sequential(nn.Flatten(), head, nn.Dropout(0.3))

    def forward(self, images):
        is_second = dist.is_initialized() and dist.get_rank() == 1
        if self.training and is_second and len(images) > MOST:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.layers(images)


@pytest.mark.parametrize(
    ("batch", "most", "expected"), [(256, 256, 1), (256, 100, 4), (12, 5, 3), (7, 6, 7), (7, 1, 7)]
)
def test_the_fewest_equal_parts_that_fit_are_found(batch, most, expected):
    tried = []

    def fits(parts):
        tried.append(parts)
        return batch // parts <= most

    assert fitting.fewest(batch, fits) == expected
    assert len(tried) == len(set(tried)) <= 4


def test_a_device_without_memory_for_one_sample_is_named():
    with pytest.raises(Failure, match="not even a microbatch of one sample fits"):
        fitting.fewest(8, lambda parts: False)


def timeless(rows):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


@pytest.mark.slow
def test_a_run_that_found_its_microbatches_is_one_that_was_given_them(outputs, monkeypatch):
    monkeypatch.setattr(preflight, "_accumulation", lambda config: ())
    found = outputs / "found"
    given = outputs / "given"
    words = [*WORDS, "train.max_duration=5ba"]
    assert main([*words, "accumulation=auto", "data.batch_size=16", f"hydra.run.dir={found}"]) == 0
    assert read(found)["accumulation_steps"] == 16 // MOST
    explicit = ["accumulation=x4", f"data.batch_size={MOST}"]
    assert main([*words, *explicit, f"hydra.run.dir={given}"]) == 0
    assert timeless(rows_of(found)) == timeless(rows_of(given))
    assert_same_checkpoint(found / "checkpoints/final", given / "checkpoints/final")

    def search(config):
        raise AssertionError("a run that goes on keeps its number")

    monkeypatch.setattr(supervise, "find_steps", search)
    longer = outputs / "longer"
    words = [f"resume={found}", "train.max_duration=8ba", "trust=true"]
    assert main([*words, f"hydra.run.dir={longer}"]) == 0
    assert read(longer)["accumulation_steps"] == 16 // MOST
    assert rows_of(longer)[-1]["train/step"] == 8
