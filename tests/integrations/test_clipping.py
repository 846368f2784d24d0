"""One call that clips plain, boosted and sharded models."""

import gc
import math
import re
import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from runner import apply_gradient_clipping, clipping_state_dict, load_clipping_state_dict
from runner.booster import Booster, LossScale, StepOrderError
from runner.booster.step_order import StepState
from runner.clip.norm import NormClip
from runner.gradients import transfer
from tests.clip.reference import norm_of, refused
from tests.clip.test_history_modes import REFERENCE, SEQUENCES
from tests.clip.test_tensor_modes import AdaGC, give, parameters, recorded


def boosted():
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    booster = Booster(loss_scale=LossScale(scale=64.0))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    booster.backward(model(torch.ones(3, 4)).square().sum(), optimizer)
    return raw, model, optimizer


def length(model):
    return norm_of([p.grad for p in model.parameters()])


@pytest.mark.parametrize("ask", ["boosted", "raw", "parameters", "trained"])
def test_a_whole_boosted_model_is_clipped_by_its_optimizer(ask):
    """Unscaled first, once a step; parameters that do not train need not be given."""
    raw, model, optimizer = boosted()
    scaled = length(raw)
    target = {"boosted": model, "raw": raw, "parameters": raw.parameters()}.get(ask)
    if ask == "trained":
        raw[0].bias.requires_grad_(False)
        target = [p for p in raw.parameters() if p.requires_grad]
    outcome = apply_gradient_clipping(target, "norm", 0.5)
    assert outcome.norm == pytest.approx(scaled / 64.0, rel=1e-5)
    assert length(raw) == pytest.approx(0.5, rel=1e-5)
    assert optimizer.stage is StepState.CLIPPED
    refused(StepOrderError, "already", apply_gradient_clipping, model, "norm", 0.5)


def test_a_model_whose_optimizer_is_gone_is_a_plain_one():
    raw, model, optimizer = boosted()
    del optimizer
    model.optimizer = None
    norm = apply_gradient_clipping(raw, "norm", math.inf).norm
    assert norm == pytest.approx(length(raw), rel=1e-6)


def graded(model, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return length(model)


def clip(model, seed):
    norm = graded(model, seed)
    decision = apply_gradient_clipping(model, "norm", norm / 2)
    assert decision.norm == pytest.approx(norm, rel=1e-6)
    assert length(model) == pytest.approx(norm / 2, rel=1e-6)


def test_what_is_kept_of_a_model_changes_with_its_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for seed in range(12):  # with a threshold of its own each
        clip(model, seed)
    model[1] = nn.Linear(4, 5)
    clip(model, 3)
    model.append(nn.Linear(5, 2))
    clip(model, 4)
    with torch.no_grad():
        model[2].weight.set_(torch.randn(7, 5))  # the same parameter in another shape
    clip(model, 6)


def test_what_is_kept_of_a_model_goes_with_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for seed in range(12):
        clip(model, seed)
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None


def test_a_wrapped_model_has_the_names_of_the_users_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    graded(model, 0)
    apply_gradient_clipping(torch.compile(model), "adaptive", 0.1, exclude=["1.weight"])


def test_fsdp_1_is_refused():
    first = nn.Sequential(type("FullyShardedDataParallel", (nn.Module,), {})(), nn.Linear(2, 2))
    refused(TypeError, "fully_shard", apply_gradient_clipping, first, "norm", 1.0)


def test_values_of_devices():
    for kind in ("cuda", "mps", "xpu", "meta"):
        assert not transfer.can_read(torch.device(kind)), kind
    assert transfer.widest(torch.device("mps")) == torch.float32
    assert transfer.widest(torch.device("cuda")) == torch.float64
    assert transfer.read_later(torch.tensor(2.5))() == 2.5
    for values in ([1.5, 1e-300], [2**53 - 1.0] * 9, []):
        vector = transfer.on_device(values, torch.device("cpu"))
        assert (vector.dtype, vector.tolist()) == (torch.float64, values)
        assert transfer.on_device(values, torch.device("meta")).device.type == "meta"


HISTORIES = {
    "percentile": {"threshold": 50.0, "window": 37},
    "zscore": {"threshold": 1.5, "history": "raw", "decay": 0.9, "warmup_steps": 7},
    "schedule": {"threshold": 0.8, "warmup_steps": 100},
}
GIVEN = {
    "module": lambda model: model,
    "parameters": lambda model: model.parameters(),  # another generator in each call
    "wrapped": torch.compile,  # another wrapper in each call
}


class OneWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def called(model, give_to, name, norms, threshold, **options):
    """The norm after each call, and λ."""
    direction = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
    steps = []
    for norm in norms:
        model.weight.grad = direction * norm
        decision = apply_gradient_clipping(give_to(model), name, threshold, **options)
        steps.append((length(model), decision.threshold))
    return steps


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", HISTORIES)
def test_calls_go_on_from_the_saved_state_of_a_model(name, given, tmp_path):
    norms = SEQUENCES["usual"][:120]
    give_to = GIVEN[given]
    first = OneWeight()
    second = OneWeight()
    results = called(first, give_to, name, norms[:50], **HISTORIES[name])
    state = clipping_state_dict(give_to(first))
    torch.save(state, tmp_path / "state")
    load_clipping_state_dict(give_to(second), torch.load(tmp_path / "state", weights_only=True))
    results += called(second, give_to, name, norms[50:], **HISTORIES[name])
    expected = list(REFERENCE[name](norms, **HISTORIES[name]))
    for step, right in zip(results, expected, strict=True):
        assert step == pytest.approx(right, rel=1e-9, nan_ok=True)
    assert any(after < norm for (after, _), norm in zip(results, norms, strict=True))


@pytest.mark.parametrize("name", ["percentile", "zscore"])
def test_a_state_that_was_saved_before_the_memory_had_its_name_goes_on(name):
    norms = SEQUENCES["usual"][:120]
    first = OneWeight()
    second = OneWeight()
    called(first, GIVEN["module"], name, norms[:50], **HISTORIES[name])
    [(key, state)] = clipping_state_dict(first).items()
    is_clipped = HISTORIES[name].get("history") == "clipped"
    kind, _, options = key.removesuffix(")").partition("(")
    reversed_key = f"{kind}({', '.join(reversed(options.split(', ')))})"
    earlier_key = re.sub("history='(raw|clipped)'", f"history={is_clipped}", reversed_key)
    assert earlier_key != key
    state["history"] = state.pop("memory")
    load_clipping_state_dict(second, {earlier_key: state})
    steps = called(second, GIVEN["module"], name, norms[50:], **HISTORIES[name])
    expected = list(REFERENCE[name](norms, **HISTORIES[name]))[50:]
    for step, right in zip(steps, expected, strict=True):
        assert step == pytest.approx(right, rel=1e-9, nan_ok=True)


def test_the_optimizer_of_a_boosted_model_saves_the_history_of_calls():
    raw, _, optimizer = boosted()
    for scale in (1.0, 2.0, 4.0):
        optimizer.backward(raw(torch.full((3, 4), scale)).square().sum())
        decision = apply_gradient_clipping(raw, "percentile", 50.0, min_steps=2)
        optimizer.zero_grad()
    assert decision.clipped == 1.0
    [state] = optimizer.state_dict()["calls"].values()
    assert len(state["memory"]["norms"]) == 3
    fresh, _, second = boosted()
    second.load_state_dict(optimizer.state_dict())
    second.backward(fresh(torch.ones(3, 4)).square().sum())
    apply_gradient_clipping(fresh, "percentile", 50.0, min_steps=2)
    [state] = clipping_state_dict(fresh).values()
    assert len(state["memory"]["norms"]) == 4


def test_calls_by_adagc_are_the_reference_for_a_list_of_parameters():
    options = {"absolute": 8.0, "beta": 0.9, "warmup_steps": 60}
    rule = AdaGC(1.5, 8.0, 0.9, 60, 2.0, "clipped")
    weights = parameters()
    clips = set()
    for gradients in recorded(120):
        if any(math.isnan(x) for values in gradients.values() for x in values or ()):
            continue
        give(weights, gradients)
        decision = apply_gradient_clipping(weights.values(), "adagc", 1.5, **options)
        expected = rule(gradients)
        clips.add(expected != gradients)
        assert decision.clipped == float(expected != gradients)
        for name, values in expected.items():
            if values is not None:
                assert weights[name].grad.tolist() == pytest.approx(values, rel=1e-10)
    assert clips == {True, False}


@pytest.fixture
def remembered():
    """A model whose norms 1 to 20 are remembered."""
    model = OneWeight()
    called(model, GIVEN["module"], "percentile", range(1, 21), 100.0)
    return model


def test_another_threshold_keeps_the_history(remembered):
    [(_, limit)] = called(remembered, GIVEN["module"], "percentile", [21.0], 50.0)
    assert limit == 11.0  # the median of 1 to 21
    assert len(clipping_state_dict(remembered)) == 1


def test_other_options_begin_another_history(remembered):
    [(_, limit)] = called(remembered, GIVEN["module"], "percentile", [21.0], 50.0, window=50)
    assert math.isnan(limit)
    assert len(clipping_state_dict(remembered)) == 2


def test_an_empty_state_forgets_all_histories(remembered):
    load_clipping_state_dict(remembered, {})
    assert clipping_state_dict(remembered) == {}


def test_thresholds_of_links_may_change_without_losing_a_history():
    model = OneWeight()
    norms = [1.0, 2.0, 3.0, 4.0]
    for step, norm in enumerate(norms, 1):
        links = [{"mode": "percentile", "threshold": 50.0, "min_steps": 2}]
        links.append({"mode": "norm", "threshold": 100.0 / step})
        [(after, _)] = called(model, GIVEN["module"], "chain", [norm], None, links=links)
    assert after == pytest.approx(2.5)


def test_a_part_of_a_list_with_a_history_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    graded(model, 0)
    part = list(model[0].parameters())
    for mode in ("percentile", "zscore"):
        apply_gradient_clipping(model.parameters(), mode, 50.0)
        refused(ValueError, "same list", apply_gradient_clipping, part, mode, 90.0)
    assert len(clipping_state_dict(model.parameters())) == 2
    apply_gradient_clipping(part, "norm", 1.0)  # a mode without memory takes it


def test_what_is_kept_of_a_list_goes_with_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    graded(model, 0)
    for mode in ("percentile", "zscore", "adaptive", "per_parameter"):
        apply_gradient_clipping(model.parameters(), mode, 50.0)
    groups = {"parameters[[]0[]]": {"mode": "norm", "threshold": 1.0}}
    apply_gradient_clipping(model.parameters(), "groups", None, groups=groups)
    apply_gradient_clipping(model[0].parameters(), "norm", 1.0)
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None


@dataclass(eq=False)
class Counted(NormClip):
    """Clipping by the norm that counts how often it was made and bound."""

    made: ClassVar[list[str]] = []

    def __post_init__(self):
        super().__post_init__()
        self.made.append("made")

    def bind(self, layout):
        self.made.append("bound")


@pytest.mark.parametrize("given", ["model", "list"])
def test_only_the_first_call_makes_the_mode(given, monkeypatch):
    monkeypatch.setattr(Counted, "made", [])
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for seed in range(3):
        norm = graded(model, seed)
        target = model if given == "model" else model.parameters()
        decision = apply_gradient_clipping(target, Counted, 0.5)
        assert decision.norm == pytest.approx(norm, rel=1e-6)
        assert length(model) == pytest.approx(0.5, rel=1e-6)
    assert Counted.made == ["made", "bound"]


def test_a_list_whose_tensors_have_changed_is_measured_anew():
    model = nn.Linear(3, 4)
    for shape in ((4, 3), (2, 5)):
        model.weight.data = torch.zeros(shape)
        clip_list = list(model.parameters())
        norm = graded(model, 0)
        decision = apply_gradient_clipping(clip_list, "adaptive", 1e9, exclude=[])
        assert decision.norm == pytest.approx(norm, rel=1e-6)
        assert decision.total == shape[0] + 1


def test_clipping_without_gradients_warns_once():
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=r"after backward\(\)"):
        apply_gradient_clipping(model, "norm", 1.0)
    apply_gradient_clipping(model, "norm", 1.0)  # a warning would be an error
    graded(model, 0)
    apply_gradient_clipping(nn.Sequential(model, nn.Linear(2, 2)), "norm", 1.0)
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        apply_gradient_clipping(nn.Linear(2, 2).parameters(), "value", 1.0)
