"""Other people's models under tensor parallelism, by a plan of patterns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from runner.booster.parallel.tensor import PlanError
from runner.booster.plugin import TensorParallelPlugin
from tests.distributed.cases import MODELS, Case, differences, train, trainer
from tests.distributed.foreign import PLAN, CausalLM
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PARTLY = {key: PLAN[key] for key in ("layers.*.mlp.up_proj", "layers.*.mlp.gate_proj")} | {
    "layers.*.mlp.down_proj": "rowwise"
}
# The words of cases.tokens are 16 numbers; 3 rows leave a fourth rank without any.
CASES = [Case("foreign", mode) for mode in ("L2", "L3", "value", "adaptive")]


def model(vocabulary=17, hidden=16):
    torch.manual_seed(0)
    return CausalLM(vocabulary, hidden).double()


def under_tensor(plan):
    return [train(case, TensorParallelPlugin(tp_plan=plan), model=model()) for case in CASES]


@pytest.mark.parametrize("plan", [PLAN, PARTLY], ids=["whole", "partly"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_foreign_model_is_one_process(plan, world, monkeypatch):
    monkeypatch.setitem(MODELS, "foreign", model)
    ranks = run_ranks(under_tensor, world, plan)
    for i, case in enumerate(CASES):
        found = differences([rank[i] for rank in ranks], case, 1e-12)
        assert not found, found[:5]


def refusals():
    said = []
    tied = model()
    tied.lm_head.weight = tied.embed_tokens.weight
    for net, plan in (
        (tied, {"embed_tokens": "embedding_rowwise", "lm_head": "rowwise"}),
        (model(), {"layers.*.self_attn.q_projj": "colwise"}),
        (model(hidden=12), PLAN),
    ):
        if net is not tied and net.norm.weight.numel() == 12:
            for layer in net.layers:
                layer.self_attn.num_heads = 3
        try:
            trainer(CASES[0], TensorParallelPlugin(tp_plan=plan), model=net)
        except PlanError as error:
            said.append(str(error))
        else:
            said.append("took it")
    return said


def test_what_cannot_be_split_is_named():
    tied, unmatched, heads = run_ranks(refusals, 2)[0]
    assert "lm_head.weight is tied to a parameter that is split another way" in tied
    assert "did you mean layers.*.self_attn.q_proj" in unmatched
    assert "layers.0.self_attn has 3 heads (num_heads)" in heads


def test_by_the_command(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(PLAN))
    target = ["model=gpt", "model._target_=tests.distributed.foreign.CausalLM"]
    dropped = ("vocabulary", "context", "layers", "heads", "width", "tied", "bias", "dropout")
    words = [
        *target,
        *(f"~model.{key}" for key in dropped),
        "device=cpu",
        "data=text",
        "data.batch_size=8",
        "train.max_duration=30ba",
        "eval.interval=1000ba",
        "tracker=none",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    curves = []
    for name, more in (
        ("one", []),
        ("two", ["plugin=tensor", "plugin.nproc=2", f"plugin.tp_plan={plan}"]),
    ):
        folder = tmp_path / name
        command = [sys.executable, "-m", "runner", *words, *more, f"hydra.run.dir={folder}"]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
        curves.append([row["train/loss"] for row in rows])
    assert len(curves[0]) == 30
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
