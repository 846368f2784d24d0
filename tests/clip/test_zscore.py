"""Mode ``zscore`` against the rule of ZClip in plain Python, over 500 steps."""

import math
from statistics import fmean, pvariance

import pytest

from runner.clip import build
from tests.clip.sequences import INF, NAN, SEQUENCES, as_wanted, clipped, recorded

OPTIONS = [
    {"threshold": 2.5},  # as published
    {"threshold": 1.0, "rule": "mean"},
    {"threshold": 2.0, "rule": "percentile"},
    {"threshold": 1.5, "history": "raw", "decay": 0.9, "warmup_steps": 7},
    {"threshold": 0.1, "warmup_steps": 1, "eps": 1e-3},
]
SAME = ("spikes", "plateau", "level shift")


def ids(options):
    return " ".join(map(str, options.values()))


def reference(
    norms,
    threshold,
    rule="adaptive_scaling",
    decay=0.97,
    warmup_steps=25,
    history="clipped",
    eps=1e-6,
):
    """The norm after clipping and λ of each step, NaN where there is none."""
    first, found = [], []
    mean = variance = 0.0
    for norm in norms:
        if not math.isfinite(norm):
            found.append((NAN, NAN))
            continue
        limit, after = NAN, norm
        if len(first) == warmup_steps and (sigma := math.sqrt(variance)) > eps * mean:
            limit = mean + threshold * (sigma if rule == "percentile" else sigma + eps)
            if norm > limit:
                z = (norm - mean) / (sigma + eps)
                after = {
                    "adaptive_scaling": mean + threshold * sigma / (z / threshold),
                    "mean": mean,
                    "percentile": mean + threshold * sigma,
                }[rule]
        enters = norm if history == "raw" else after
        if len(first) < warmup_steps:
            first.append(enters)
            mean, variance = fmean(first), pvariance(first)
        else:
            mean = decay * mean + (1 - decay) * enters
            variance = decay * variance + (1 - decay) * (enters - mean) ** 2
        found.append((after, limit))
    return found


@pytest.mark.parametrize("name", ["recorded", *SEQUENCES])
@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_every_step_is_that_of_the_rule(name, options):
    norms = recorded() if name == "recorded" else SEQUENCES[name]
    found = clipped(build("zscore", **options), norms)
    wanted = reference(norms, **options)
    for norm, _, known, changed in as_wanted(norms, found, wanted, rel=1e-9):
        assert changed == float(norm > known)


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_an_accelerator_decides_the_same_and_is_never_waited_for(name, options):
    norms = SEQUENCES[name][:270]
    host = clipped(build("zscore", **options), norms)
    device = clipped(build("zscore", **options), norms, on_device=True)
    for one, other in zip(host, device, strict=True):
        assert other[1:] == pytest.approx(one[1:], rel=1e-12, nan_ok=True)


def test_zclip_with_its_faults():
    """The published code, without its second limit of 1.0 that is on by default.

    One norm that is not finite leaves its mean NaN, after which it never clips again. After a
    plateau it clips the least change, and a lasting rise is never accepted.
    """

    def zclip(norms, z=2.5):
        first, mean, variance = [], None, None
        for norm in norms:
            after = norm
            if mean is None:
                first.append(norm)
                if len(first) == 25:
                    mean, variance = fmean(first), sum((n - fmean(first)) ** 2 for n in first) / 25
            else:
                score = (norm - mean) / (variance**0.5 + 1e-6)
                if score > z:
                    after = mean + z * variance**0.5 / (score / z)
                mean = 0.97 * mean + 0.03 * after
                variance = 0.97 * variance + 0.03 * (after - mean) ** 2
            yield after

    norms = recorded()
    found = [step[0] for step in clipped(build("zscore", threshold=2.5), norms)]
    assert found == pytest.approx(list(zclip(norms)), rel=1e-5)
    assert found != pytest.approx(norms, rel=1e-5)
    broken = [*norms[:50], NAN, *norms[50:300], 1e9]
    assert list(zclip(broken))[-1] == 1e9
    assert clipped(build("zscore", threshold=2.5), broken)[-1][0] < 1e3
    rises = [1.0] * 100 + [2.0] * 400
    assert list(zclip(rises))[-1] == pytest.approx(1.0, rel=1e-3)
    for history in ("raw", "clipped"):
        mode = build("zscore", threshold=2.5, history=history)
        assert clipped(mode, rises)[-1][0] == pytest.approx(2.0, rel=1e-12)


def test_mean_and_variance_keep_their_digits():
    """A sum of squares would lose all of them."""
    norms = [1e9 + step % 2 for step in range(25)]
    mode = build("zscore", threshold=2.5)
    clipped(mode, norms)
    state = mode.state_dict()["history"]
    assert state["mean"] == pytest.approx(fmean(norms), rel=1e-15)
    assert state["variance"] == pytest.approx(pvariance(norms), rel=1e-6)


@pytest.mark.parametrize("at", [10, 25, 100])
@pytest.mark.parametrize(("before", "after"), [(False, False), (True, True), (True, False)])
def test_a_resume_changes_no_bit_on_any_device(at, before, after):
    norms, options = SEQUENCES["spikes"][:300], OPTIONS[0]
    mode, again = build("zscore", **options), build("zscore", **options)
    whole = clipped(build("zscore", **options), norms, on_device=before)
    clipped(mode, norms[:at], on_device=before)
    again.load_state_dict(mode.state_dict())
    for one, other in zip(whole[at:], clipped(again, norms[at:], after), strict=True):
        rel = 0 if before == after else 1e-12
        assert other[1:] == pytest.approx(one[1:], rel=rel, abs=0, nan_ok=True)


def test_a_step_that_is_not_finite_leaves_the_history_as_it_was():
    norms = SEQUENCES["usual"][:60]
    for on_device in (False, True):
        mode, plain = build("zscore", threshold=2.5), build("zscore", threshold=2.5)
        clipped(plain, norms, on_device)
        clipped(mode, [*norms[:30], NAN, INF, *norms[30:], NAN], on_device)
        one, other = mode.state_dict()["history"], plain.state_dict()["history"]
        assert list(map(float, one.values())) == list(map(float, other.values()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "median"}, "rule must be adaptive_scaling, mean or percentile, not 'median'"),
        ({"history": "kept"}, "history must be raw or clipped, not 'kept'"),
        ({"decay": 1.0}, "decay must be above 0 and below 1, not 1.0"),
        ({"eps": 0.0}, "eps must be above 0, not 0.0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        build("zscore", **options)
    assert str(raised.value) == message
