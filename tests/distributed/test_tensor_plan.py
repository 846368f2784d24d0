"""Other people's models under tensor parallelism, by a plan of patterns."""

import json

import pytest
import torch
import yaml
from torch import nn

from runner.booster.plugin import HybridParallelPlugin, TensorParallelPlugin
from runner.parallel.tensor_styles import PlanError
from tests.distributed.by_hand import Loop
from tests.distributed.cases import MODELS, Case, differences, train, trainer
from tests.distributed.foreign import PLAN, CausalLM
from tests.process import python
from tests.ranks import run_ranks

PARTLY = {key: PLAN[key] for key in ("layers.*.mlp.up_proj", "layers.*.mlp.gate_proj")} | {
    "layers.*.mlp.down_proj": "rowwise"
}
GATHERED = PLAN | {
    "layers.*.mlp.gate_proj": "colwise_gather_output",
    "layers.*.mlp.up_proj": "colwise_gather_output",
    "layers.*.mlp.down_proj": "rowwise_split_input",
    "lm_head": "colwise_gather_output",
}
# The words of cases.tokens are 16 numbers; 3 rows leave a fourth rank without any.
CASES = [Case("foreign", mode) for mode in ("L2", "L3", "value", "adaptive")]


def model(vocabulary=17, hidden=16, **more):
    torch.manual_seed(0)
    return CausalLM(vocabulary, hidden, **more).double()


def under_tensor(plan):
    return [train(case, TensorParallelPlugin(tp_plan=plan), model=model()) for case in CASES]


@pytest.mark.parametrize("plan", [PLAN, PARTLY, GATHERED], ids=["whole", "partly", "gathered"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.product(every=3)
def test_a_foreign_model_is_one_process(plan, world, monkeypatch):
    monkeypatch.setitem(MODELS, "foreign", model)
    ranks = run_ranks(under_tensor, world, plan)
    for i, case in enumerate(CASES):
        found = differences([rank[i] for rank in ranks], case, 1e-12)
        assert not found, found[:5]


NORMED = PLAN | {"layers.*.self_attn.[qk]_norm": "replicated_with_grad_allreduce"}
NORMED_CASE = Case("normed", "L2", steps=2)


def normed(starts_at_zero=False):
    net = model(qk_norm=True)
    if starts_at_zero:
        for layer in net.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
    return net


def with_norms_of_heads():
    plugins = [TensorParallelPlugin(tp_plan=NORMED)]
    plugins += [HybridParallelPlugin(tp_size=2, zero_stage=3, tp_plan=NORMED)]
    trained = [train(NORMED_CASE, plugin, model=normed()) for plugin in plugins]
    said = []
    for starts_at_zero in (False, True):
        plugin = TensorParallelPlugin(tp_plan=PLAN)
        with pytest.raises(PlanError) as raised:
            train(NORMED_CASE, plugin, model=normed(starts_at_zero))
        said.append(str(raised.value))
    return trained, said


def test_norms_of_heads_are_summed_by_their_style_and_named_without_it(monkeypatch):
    monkeypatch.setitem(MODELS, "normed", normed)
    ranks = run_ranks(with_norms_of_heads, 4)
    for i in range(2):
        found = differences([trained[i] for trained, _ in ranks], NORMED_CASE, 1e-12)
        assert not found, found[:5]
    norms = [f"layers.{i}.self_attn.{x}_norm.weight" for i in (0, 1) for x in "qk"]
    for _, said in ranks:
        for message in said:
            assert message.startswith(f"{', '.join(norms)}: the gradient differs")
            assert "replicated_with_grad_allreduce" in message


class Reused(nn.Module):
    """Computes with the weights of what is inside it."""

    def __init__(self, attends):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if attends else None

    def forward(self, tokens):
        hidden = self.embed(tokens)
        if self.attention is not None:
            return self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return hidden @ self.embed.weight.T


def wrong_in_the_forward_pass():
    said = []
    for net, token in ((model(), 17), (model(), -1), (Reused(False), 1), (Reused(True), 1)):
        plan = PLAN if isinstance(net, CausalLM) else {"embed": "embedding_rowwise"}
        loop = Loop(TensorParallelPlugin(tp_plan=plan), net)
        with pytest.raises((IndexError, PlanError)) as raised:
            loop.model(torch.tensor([[2, token, 3]]))
        said.append(f"{raised.type.__name__}: {raised.value}")
    return said


def test_what_goes_wrong_in_the_forward_pass_is_said_by_every_rank():
    for high, low, reused, attention in run_ranks(wrong_in_the_forward_pass, 2):
        assert high == low == "IndexError: index out of range in self"
        assert reused.startswith("PlanError: Reused computes with a parameter of a module inside")
        assert attention.startswith("PlanError: attention (MultiheadAttention) computes with")


def refusals():
    said = []
    tied = model()
    tied.lm_head.weight = tied.embed_tokens.weight
    for net, plan in (
        (tied, {"embed_tokens": "embedding_rowwise", "lm_head": "rowwise"}),
        (model(), {"layers.*.self_attn.q_projj": "colwise"}),
        (model(hidden=12), PLAN),
        (model(), PARTLY),
    ):
        if net is not tied and net.norm.weight.numel() == 12:
            for layer in net.layers:
                layer.self_attn.num_heads = 3
        try:
            plugin = TensorParallelPlugin(tp_plan=plan, sequence_parallel=plan is PARTLY)
            trainer(CASES[0], plugin, model=net)
        except PlanError as error:
            said.append(str(error))
        else:
            said.append("took it")
    return said


def test_what_cannot_be_split_is_named():
    tied, unmatched, heads, sequence = run_ranks(refusals, 2)[0]
    assert "lm_head.weight is tied to embed_tokens.weight, which is split another way" in tied
    assert "did you mean layers.*.self_attn.q_proj" in unmatched
    assert "layers.0.self_attn has 3 heads (num_heads)" in heads
    assert "give the style split_sequence to the module" in sequence


@pytest.mark.slow
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
    curves = []
    for name, more in (
        ("one", []),
        ("two", ["plugin=tensor", "plugin.nproc=2", f"plugin.tp_plan={plan}"]),
    ):
        folder = tmp_path / name
        python("-m", "runner", *words, *more, f"hydra.run.dir={folder}", cwd=tmp_path)
        rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
        curves.append([row["train/loss"] for row in rows])
    assert len(curves[0]) == 30
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
