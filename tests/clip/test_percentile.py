"""Mode ``percentile`` against NumPy's percentile of all norms, over 500 steps."""

import copy
import math

import numpy as np
import pytest
import torch

from runner.clip import GradStats, Layout, build
from tests.clip.sequences import INF, NAN, SEQUENCES, as_wanted, clipped, recorded

OPTIONS = [
    {"threshold": 10.0, "min_steps": 1},  # as published
    {"threshold": 90.0},
    {"threshold": 50.0, "window": 37},
    {"threshold": 25.0, "history": "clipped"},
    {"threshold": 75.0, "history": "clipped", "window": 100, "min_steps": 100},
    {"threshold": 100.0, "window": 1, "min_steps": 1},
]
SAME = ("spikes", "zeros")


def reference(norms, threshold, window=None, history="raw", min_steps=10):
    """The norm after clipping and λ of each step, NaN where there is none."""
    past, found = [], []
    for norm in norms:
        if not math.isfinite(norm):
            found.append((NAN, NAN))
            continue
        known = [*past, norm][-window if window else 0 :]
        limit = float(np.percentile(known, threshold))
        if len(known) < min_steps or limit == 0:
            limit = NAN
        after = min(norm, limit) if limit == limit else norm
        past.append(norm if history == "raw" else after)
        found.append((after, limit))
    return found


@pytest.mark.parametrize("name", ["recorded", *SEQUENCES])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: " ".join(map(str, one.values())))
@pytest.mark.product(every=3)
def test_every_step_is_that_of_the_rule(name, options):
    norms = recorded() if name == "recorded" else SEQUENCES[name]
    found = clipped(build("percentile", **options), norms)
    wanted = reference(norms, **options)
    for norm, right, _, changed in as_wanted(norms, found, wanted, rel=1e-12):
        assert changed == (1.0 if right < norm * (1 - 1e-12) else changed)
        assert changed == 0 or right <= norm


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("options", OPTIONS[:5], ids=lambda one: " ".join(map(str, one.values())))
def test_an_accelerator_decides_the_same_and_is_never_waited_for(name, options):
    norms = SEQUENCES[name][:300]  # the buffer grows at step 257
    host = clipped(build("percentile", **options), norms)
    device = clipped(build("percentile", **options), norms, on_device=True)
    for one, other in zip(host, device, strict=True):
        assert other[1:] == pytest.approx(one[1:], rel=1e-15, nan_ok=True)
        if math.isfinite(one[1]):
            assert other[0] == pytest.approx(one[0], rel=1e-15)


def test_autoclip_with_its_faults():
    """The published code: λ of all norms, this one too; a coefficient with 1e-6; NaN stays.

    After one step that is not finite it clips every gradient to NaN; a percentile of 0 stops the
    training. Otherwise the gradients are the same.
    """

    def autoclip(norms, p):
        history = []
        for norm in norms:
            history.append(norm)
            yield norm * min(np.percentile(history, p) / (norm + 1e-6), 1.0)

    norms = [one + 1.0 for one in recorded()]
    options = {"threshold": 10.0, "min_steps": 1}
    found = [step[0] for step in clipped(build("percentile", **options), norms)]
    assert found == pytest.approx(list(autoclip(norms, 10.0)), rel=1e-5)
    broken = [*norms[:50], NAN, *norms[50:100]]
    assert np.isnan(list(autoclip(broken, 10.0))[51:]).all()
    found = [step[0] for step in clipped(build("percentile", **options), broken)]
    assert found[51:] == pytest.approx(list(autoclip(norms[:100], 10.0))[50:], rel=1e-5)
    often_zero = [norm for norm in SEQUENCES["zeros"] if math.isfinite(norm)]
    assert sum(autoclip(often_zero, 10.0)) < 20
    assert sum(step[0] for step in clipped(build("percentile", **options), often_zero)) > 150


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2], OPTIONS[4]], ids=[*"abc"])
@pytest.mark.parametrize("at", [40, 256])
@pytest.mark.parametrize(("before", "after"), [(False, False), (True, True), (True, False)])
def test_a_resume_changes_no_bit_on_any_device(options, at, before, after, tmp_path):
    norms = SEQUENCES["spikes"][:320]
    whole = clipped(build("percentile", **options), norms, on_device=before)
    mode, again = build("percentile", **options), build("percentile", **options)
    clipped(mode, norms[:at], on_device=before)
    torch.save(mode.state_dict(), tmp_path / "state")
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    found = clipped(again, norms[at:], on_device=after)
    # A host and an accelerator sum the squares of ‖G‖ in another order.
    rel = 0 if before == after else 1e-12
    for one, other in zip(whole[at:], found, strict=True):
        assert other[1:] == pytest.approx(one[1:], rel=rel, abs=0, nan_ok=True)


def test_a_step_that_is_not_finite_leaves_the_history_as_it_was():
    norms = SEQUENCES["usual"][:60]
    for options in OPTIONS:
        for on_device in (False, True):
            mode, plain = build("percentile", **options), build("percentile", **options)
            clipped(plain, norms, on_device)
            clipped(mode, [*norms[:30], NAN, INF, *norms[30:], NAN], on_device)
            one, other = mode.state_dict(), plain.state_dict()
            assert one["history"].keys() == other["history"].keys()
            for name, value in one["history"].items():
                assert torch.equal(value, other["history"][name]), name


def test_norms_beyond_the_window_are_forgotten():
    mode = build("percentile", threshold=10.0, window=20)
    clipped(mode, [100.0] * 50 + SEQUENCES["usual"][:20])
    recent = mode.state_dict()["history"]["recent"]
    assert sorted(recent.tolist()) == pytest.approx(sorted(SEQUENCES["usual"][:20]))


def test_a_state_of_another_window_is_refused():
    for window, other in ((None, 20), (20, None), (20, 30)):
        mode = build("percentile", threshold=10.0, window=window)
        clipped(mode, SEQUENCES["usual"][:50])
        with pytest.raises(ValueError, match=f"^window={other} is not that of the state"):
            build("percentile", threshold=10.0, window=other).load_state_dict(mode.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 101.0}, "threshold is the percentile for clip=percentile: at most 100"),
        ({"history": "kept"}, "history must be raw or clipped, not 'kept'"),
        (
            {"threshold": 10.0, "window": 5},
            "window never holds clip.min_steps=10 norms: use at least 10",
        ),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        build("percentile", **options)
    assert str(raised.value) == message


def test_a_copy_goes_on_by_itself():
    mode = build("percentile", threshold=50.0, min_steps=1)
    stats, layout = GradStats(2.0, True), Layout([])
    mode.decide(layout, stats)
    again = copy.deepcopy(mode)
    mode.decide(layout, GradStats(8.0, True))
    assert again.decide(layout, GradStats(4.0, True)).threshold == 3.0
