"""What does not go with ``clip.when=backward`` is refused before anything is created."""

import re

import pytest

from runner.compose.request import request
from runner.config.check import parse
from runner.config.problem import RequestError

STEPS = ["clip.step_in_backward=true", "clip.nonfinite=error"]

GOOD = [
    *([f"clip={mode}"] for mode in ("none", "value", "adaptive", "per_parameter", "adagc")),
    *([f"clip={mode}", *STEPS] for mode in ("none", "value", "adaptive", "per_parameter")),
    *([f"clip={mode}", "optimizer=adamw", *STEPS] for mode in ("update", "spike")),
    *(["clip=value", f"plugin={plugin}", "plugin.nproc=2"] for plugin in ("ddp", "fsdp")),
    ["clip=value", "accumulation=x4", *STEPS],
]

REFUSED = {
    "clip=norm": ("clip.when", "needs the whole gradient.*use step.*per_parameter"),
    "clip=percentile": ("clip.when", "needs the whole gradient"),
    "clip=zscore": ("clip.when", "needs the whole gradient"),
    "clip=schedule": ("clip.when", "sets the threshold of another mode"),
    "clip=chain clip.links=[{mode:value,threshold:1.0}]": ("clip.when", "modes in clip.links"),
    "clip=groups clip.groups={*.weight:0.1}": ("clip.when", "modes in clip.groups"),
    "clip=per_parameter clip.by=block": ("clip.when", "use clip.by=tensor"),
    "clip=update clip.rule=sigma optimizer=adamw clip.step_in_backward=true clip.nonfinite=error": (
        "clip.when",
        "use clip.rule=rms",
    ),
    "clip=value plugin=zero plugin.nproc=2": ("clip.when", "plugin=zero makes gradients final"),
    "clip=value plugin=tensor plugin.nproc=2": ("clip.when", "plugin=tensor makes gradients final"),
    "clip=value plugin=pipeline plugin.nproc=2": ("clip.when", "plugin=pipeline makes"),
    "clip=value plugin=hybrid plugin.nproc=2": ("clip.when", "plugin=hybrid makes"),
    "clip=value precision=fp16": ("precision", "an overflow leaves out a whole step"),
    "clip=value clip.nonfinite=ignore": ("clip.nonfinite", "use error, skip or clip.when=step"),
    "clip=value clip.step_in_backward=true": ("clip.nonfinite", "cannot be taken back.*use error"),
    "clip=value clip.skip=sigma": ("clip.skip", "known after the backward pass"),
    "clip=update optimizer=adamw": ("clip.step_in_backward", "limits the step itself: use true"),
}


def parsed(words):
    return parse(request(words, writes=False).jobs[0].plain)


@pytest.mark.parametrize("words", GOOD, ids=" ".join)
def test_what_goes_together(words):
    clip = parsed(["clip.when=backward", *words]).clip
    assert (clip.when, clip.step_in_backward) == ("backward", STEPS[0] in words)


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not(words):
    key, message = REFUSED[words]
    with pytest.raises(RequestError) as error:
        parsed(["clip.when=backward", *words.split()])
    found = {problem.key: problem.message for problem in error.value.problems}
    assert set(found) == {key}
    assert re.search(message, found[key]), found[key]


def test_steps_in_the_backward_pass_need_clipping_there():
    with pytest.raises(RequestError) as error:
        parsed(["clip=value", *STEPS])
    assert [problem.key for problem in error.value.problems] == ["clip.step_in_backward"]


def test_files_and_recorded_runs_may_be_older_than_the_keys():
    plain = request(["clip=value"], writes=False).jobs[0].plain
    del plain["clip"]["when"], plain["clip"]["step_in_backward"]
    clip = parse(plain).clip
    assert (clip.when, clip.step_in_backward) == ("step", False)
