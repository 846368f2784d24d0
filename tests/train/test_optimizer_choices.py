"""``optimizer=muon``, ``lion`` and ``adafactor`` by name: what is made and resumed."""

import pytest
import torch

from runner.config.notation import Duration
from runner.config.request import request
from runner.train.build import make_trainer
from tests.ranks import run_ranks

SMALL = ["model=gpt", "model.context=16", "model.width=16", "model.layers=1", "data=text"]
SMALL += ["data.sequence_length=16", "data.max_bytes=30000", "tracker=none", "device=cpu"]
RUN = [*SMALL, "eval.interval=1000ba", "train.max_duration=4ba", "clip.threshold=0.5"]
ONE_RANK = [("single", name) for name in ("muon", "lion", "adafactor")]
TWO_RANKS = [("zero", "adafactor"), ("fsdp", "muon"), ("zero", "muon")]


def local_tensors(trainer):
    tensors = {shard.name: shard.weight for shard in trainer.optimizer.layout.shards}
    for i, optimizer in enumerate(trainer.optimizer.optimizers):
        for j, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    local = value.to_local() if hasattr(value, "to_local") else value
                    tensors[f"{i}/{j}/{key}"] = local
    return tensors


def require_exact_resume(given, folder):
    """Assert that a training saved after step 2 ends with the bits of one that was not."""
    for plugin, name in given:
        ranks = "data.batch_size=8" if plugin == "single" else "data.batch_size=4 plugin.nproc=2"
        [job] = request([*RUN, f"optimizer={name}", f"plugin={plugin}", *ranks.split()]).jobs
        made = job.config
        whole = make_trainer(made, [], evaluates=False)
        whole.fit()
        first = make_trainer(made, [], evaluates=False, max_duration=Duration(2, "ba"))
        first.fit()
        path = first.save(folder / f"{plugin}_{name}")
        second = make_trainer(made, [], evaluates=False)
        second.load(path)
        second.fit()
        wanted, found = local_tensors(whole), local_tensors(second)
        assert found.keys() == wanted.keys()
        differing = [key for key in wanted if not torch.equal(found[key], wanted[key])]
        assert differing == [], (plugin, name)


def test_a_training_that_was_saved_continues_with_the_same_bits(tmp_path):
    pytest.importorskip("timm")
    require_exact_resume(ONE_RANK, tmp_path)
    run_ranks(require_exact_resume, 2, TWO_RANKS, tmp_path)
