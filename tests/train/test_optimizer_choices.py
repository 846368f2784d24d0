"""``optimizer=muon``, ``lion`` and ``adafactor`` by name: what is made, resumed and refused."""

import inspect
import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from runner.booster import saved
from runner.cli.main import main
from runner.compose.request import request
from runner.config.duration import Duration
from runner.config.problem import RequestError
from runner.train import build, preflight
from runner.train.job import make_trainer
from tests.process import python
from tests.ranks import run_ranks

SMALL = ["model=gpt", "model.context=16", "model.width=16", "model.layers=1", "data=text"]
SMALL += ["data.sequence_length=16", "data.max_bytes=30000", "tracker=none", "device=cpu"]
RUN = [*SMALL, "eval.interval=1000ba", "train.max_duration=6ba", "clip.threshold=0.5"]
OPTIMIZERS = ("muon", "lion", "adafactor")
OVER_RANKS = [("ddp", "adafactor"), ("fsdp", "lion"), ("zero", "adafactor")]
OVER_RANKS += [(plugin, "muon") for plugin in ("ddp", "fsdp", "zero")]


def config(*words):
    [job] = request([*RUN, *words], writes=False).jobs
    return job.config


@pytest.mark.parametrize("name", ["lion", "muon"])
def test_its_class_takes_the_keys_of_its_file(name):
    pytest.importorskip("timm")
    target = config(f"optimizer={name}").optimizer
    known = inspect.signature(build.maker(target).func).parameters
    assert target.arguments.keys() <= known.keys()
    # Not in the file are what the runner gives, and what torch chooses by itself.
    given = {"model", "heads", "others", "fused", "params", "foreach", "maximize"}
    rest = known.keys() - target.arguments.keys() - given
    assert rest <= {"caution", "corrected_weight_decay"}


def words_of(plugin, name):
    ranks = [] if plugin == "single" else [f"plugin={plugin}", "plugin.nproc=2"]
    return [f"optimizer={name}", f"data.batch_size={8 if plugin == 'single' else 4}", *ranks]


def trained(given, folder):
    """Whether a training that was saved after step 3 ends with the bits of one that was not."""
    found = {}
    for plugin, name in given:
        made = config(*words_of(plugin, name))
        whole = make_trainer(made, [], evaluates=False)
        whole.fit()
        first = make_trainer(made, [], evaluates=False, max_duration=Duration(3, "ba"))
        first.fit()
        path = first.save(folder / f"{plugin}_{name}")
        second = make_trainer(made, [], evaluates=False)
        second.load(path)
        second.fit()
        states = [
            {
                **saved.model_tensors(each.model),
                **saved.optimizer_tensors(each.optimizer),
            }
            for each in (whole, second)
        ]
        assert states[0].keys() == states[1].keys()
        differing = [
            key
            for key, tensor in states[0].items()
            if not torch.equal(saved_local(tensor), saved_local(states[1][key]))
        ]
        norms = [each.state.meter.summary()["grad/norm"] for each in (whole, second)]
        found[plugin, name] = (differing, norms[0] == norms[1], sorted(states[0]))
    return found


def saved_local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check(ranks):
    for plugin, name in ranks[0]:
        found = [rank[plugin, name] for rank in ranks]
        assert not any(differing for differing, _, _ in found), (plugin, name)
        assert all(norms for _, norms, _ in found), (plugin, name)
        keys = {key for _, _, each in found for key in each}  # ZeRO 1 divides them among ranks
        if name == "muon":
            assert any(key.endswith("/momentum_buffer") for key in keys)
            assert any(key.startswith("optimizer/1/") for key in keys)


def test_a_training_that_was_saved_continues_with_the_same_bits(tmp_path):
    pytest.importorskip("timm")
    check([trained([("single", name) for name in OPTIMIZERS], tmp_path)])


def test_over_ranks_too(tmp_path):
    pytest.importorskip("timm")
    check(run_ranks(trained, 2, OVER_RANKS, tmp_path))


def test_a_run_by_the_command_and_one_that_continues_with_other_rates(tmp_path):
    """The norms of the row are of the whole model, and of what the coefficient multiplies."""

    def run(folder, *words):
        common = [*RUN, "optimizer=muon", "scheduler=constant", "checkpoint.interval=3ba"]
        python("-m", "runner", *common, *words, f"hydra.run.dir={tmp_path / folder}")
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    for row in run("whole"):
        part, norm, threshold = row["grad/norm_scaled"], row["grad/norm"], row["clip/threshold"]
        assert part < norm
        assert row["clip/clipped"] == (part > threshold)
        rest = norm**2 - part**2
        after = (min(part, threshold) ** 2 + rest) ** 0.5
        assert row["grad/norm_clipped"] == pytest.approx(after, rel=1e-6)
        assert row["clip/coef"] == pytest.approx(after / norm, rel=1e-6)
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "Where Muon steps matrices, this is the norm of all other gradients" in page
    taken = tmp_path / "whole" / "checkpoints" / "step_000000003"
    run("other", f"resume={taken}", "resume.force=true", "optimizer.adamw_lr=0")
    start, end = weights(taken), weights(tmp_path / "other" / "checkpoints" / "final")
    matrix, table = "blocks.0.mlp.up.weight", "embed.weight"
    assert torch.equal(start[table], end[table])  # AdamW at a rate of 0
    assert not torch.equal(start[matrix], end[matrix])


def weights(checkpoint):
    [file] = checkpoint.glob("*.safetensors")
    return load_file(file)


def refusal(*words):
    with pytest.raises(RequestError) as error:
        preflight.check(config(*words))
    return str(error.value)


def test_a_model_without_hidden_matrices_is_refused_at_the_door(capsys):
    assert main(["optimizer=muon", "tracker=none"]) == 2
    said = capsys.readouterr().err
    assert "(1 problem)" in said
    assert "DigitsCNN has no hidden matrix, which Muon is for" in said
    assert "use optimizer=adamw, or another model such as model=gpt data=text" in said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["optimizer.exclude=[ruoter.*]"], ["optimizer.exclude=[ruoter.*]", "no parameter of: "]),
        (["optimizer.adjust_lr_fn=rms"], ["optimizer.adjust_lr_fn=rms", "must be original, match"]),
        (["optimizer.adamw_betas=[1.5,0.9]"], ["optimizer.adamw_betas=[1.5,0.9]", "Invalid beta"]),
        (
            ["+optimizer.fuse=true"],
            ["optimizer.fuse=true", "no such argument; did you mean fused?"],
        ),
    ],
)
def test_wrong_arguments_of_muon(words, parts):
    said = refusal("optimizer=muon", *words)
    assert "(1 problem)" in said
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    "plugin",
    [
        ["plugin=fsdp"],
        ["plugin=zero", "plugin.zero_stage=2"],
        ["plugin=tensor"],
        ["plugin=hybrid", "plugin.tp_size=2"],
    ],
)
def test_adafactor_is_refused_where_a_rank_holds_shards(plugin, capsys):
    assert main([*RUN, "optimizer=adafactor", *plugin, "plugin.nproc=2"]) == 2
    said = capsys.readouterr().err
    assert "(1 problem)" in said
    assert f"steps whole parameters, which {plugin[0]} shards; use plugin=ddp, " in said


@pytest.mark.parametrize("plugin", [["plugin=ddp"], ["plugin=zero"], ["plugin=pipeline"]])
def test_adafactor_is_taken_elsewhere(plugin):
    assert config("optimizer=adafactor", *plugin, "plugin.nproc=2").optimizer.target


def test_lion_names_the_extra_that_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.delitem(sys.modules, "timm.optim", raising=False)
    said = refusal("optimizer=lion")
    assert "(1 problem)" in said
    assert 'needs timm, which is not installed: pip install "clip-runner[optim]"' in said


def test_lion_is_that_of_its_paper():
    """Chen et al. 2023 (arXiv 2302.06675, algorithm 2), in float64."""
    pytest.importorskip("timm")
    layer = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    target = config("optimizer=lion", "optimizer.lr=0.01", "optimizer.weight_decay=0.3").optimizer
    [optimizer] = build.make_optimizers(target, layer)
    weight, mean = layer.weight.detach().clone(), torch.zeros(2, 3, dtype=torch.float64)
    for step in range(20):
        drawn = torch.Generator().manual_seed(step)
        gradient = torch.randn(2, 3, generator=drawn, dtype=torch.float64)
        weight -= 0.01 * (torch.sign(0.9 * mean + 0.1 * gradient) + 0.3 * weight)
        mean = 0.99 * mean + 0.01 * gradient
        layer.weight.grad = gradient
        optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), weight, rtol=0, atol=1e-12)


def test_an_optimizer_of_ones_own_may_be_made_from_the_model():
    target = config("optimizer._target_=tests.train.test_optimizer_choices.by_depth").optimizer
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    criterion = nn.Linear(1, 1)
    first, second = build.make_optimizers(target.with_arguments({"lr": 0.1}), model, criterion)
    assert [g["lr"] for g in first.param_groups + second.param_groups] == [0.1, 0.05]
    with pytest.raises(build.TargetError, match="returned list, not a torch"):
        build.make_optimizers(target.with_arguments({"lr": 0.0}), model)


def by_depth(model, lr):
    if lr == 0.0:
        return []
    return [torch.optim.SGD(layer.parameters(), lr / (i + 1)) for i, layer in enumerate(model)]
