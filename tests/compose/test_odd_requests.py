"""Requests that made Python raise, or compute without end, are refused at once in one message."""

import pytest

from runner.cli.run import read
from runner.compose.composer import Source
from runner.compose.recorded import recorded
from runner.compose.request import request
from runner.config.problem import RequestError
from tests.mode_names import LISTED

pytestmark = pytest.mark.usefixtures("outputs")

NAME = "n" * 300


def doubling(form):
    """Values of which each holds the one before twice."""
    values = [form.replace("?", f"${{model.x{number}}}") for number in range(40)]
    return [
        "+model.x0=aaaa",
        *(f"+model.x{number}={value}" for number, value in enumerate(values, start=1)),
    ]


# The overrides, and what the message must say.
ODD = [
    (["tracker.project=${runner.keys:}"], ["tracker.project=", "part of --help"]),
    (["tracker.project=${runner.recipes:}"], ["tracker.project=", "part of --help"]),
    (["tracker.project=${hydra.help.template}"], ["tracker.project="]),
    (
        ["tracker.project=${tracker.group}", "tracker.group=${tracker.project}"],
        ["tracker.project="],
    ),
    (doubling("'??'"), ["model.x10=${model.x9}${model.x9}", "20,000 characters"]),
    (doubling("['?','?']"), ["model.x11.0=${model.x10}", "20,000 characters"]),
    (doubling("'${oc.select:model.x0,?}?'"), ["20,000 characters"]),
    (["-m", "seed=1,2", *doubling("'??'")], ["model.x10=${model.x9}${model.x9}"]),
    (["clip=adaptive", "clip.exclude=[interval(0,1)]"], ["clip.exclude=", "inside a list"]),
    (["clip=adaptive", "clip.exclude=[a,[choice(1,2)]]"], ["clip.exclude=", "inside a list"]),
    (["clip.what_if={a:range(3)}"], ["clip.what_if=", "inside a list"]),
    (["-m", "seed=1,range(0,3)"], ["seed=", "inside a list"]),
    (["seed=" + "9" * 5000], ["seed=", "cannot be read", "(5,002 characters)"]),
    (["seed=" + "9" * 400], ["seed=", "at most 4294967295"]),
    (["clip.threshold=" + "9" * 400], ["clip.threshold=", "finite number"]),
    (["optimizer.lr=" + "9" * 400], ["optimizer.lr=", "finite number"]),
    (["train.max_duration=" + "9" * 5000 + "ep"], ["train.max_duration=", "ep (epochs)"]),
    (["clip=adaptive", "clip.exclude=" + "[" * 3000 + "]" * 3000], ["nested too deep"]),
    (["clip=adaptive", "clip.exclude=" + "[" * 150_000], ["150,013 characters"]),
    (["tracker.project='a\nb'", "seed=-1"], ["seed=-1"]),
    (["tracker.project=a\0b"], ["tracker.project=", "no character of a text"]),
    (["tracker.project=a\udcffb"], ["tracker.project=", "no character of a text"]),
    ([f"clip={NAME}"], ["clip=nnn", LISTED]),
    ([f"recipe={NAME}"], ["recipe=nnn", "accumulate_4"]),
    ([f"clip._target_={NAME}.{NAME}"], ["clip._target_=nnn", "there is no module"]),
    ([f"hydra.run.dir={NAME}"], ["hydra.run.dir=", "has 300 bytes"]),
    (["hydra.run.dir=" + "/".join(["n" * 250] * 17)], ["hydra.run.dir=", "the path has"]),
    (["-m", "seed=1,2", f"sweep.name={NAME}"], ["sweep.name=", "at most 100"]),
    (["-m", "seed=1,2", "sweep.name='" + "猫" * 90 + "'"], ["sweep.name=", "at most 200 bytes"]),
    (["-m", "clip.threshold=range(0,1e9)"], ["sweep.max_jobs=10000", "clip.threshold alone"]),
    (["-m", "clip.threshold=range(0,1000000000)"], ["sweep.max_jobs=10000", "clip.threshold"]),
    (["-m", "clip.threshold=shuffle(range(0,1e9))"], ["sweep.max_jobs=10000", "clip.threshold"]),
    (["-m", "clip.threshold=range(1,2,1e-30)"], ["sweep.max_jobs=10000", "clip.threshold"]),
    (["-m", "clip.threshold=range(0,1e999)"], ["sweep.max_jobs=10000"]),
    (["-m", "clip.threshold=range(0,1,0)"], ["clip.threshold="]),
    (
        ["-m", "seed=range(0,300)", "clip.threshold=range(1,400)"],
        ["sweep.max_jobs=10000", "119,700 runs", "seed 300, clip.threshold 399"],
    ),
    (["-m", "seed=range(0,9)", "sweep.max_jobs=8"], ["sweep.max_jobs=8", "seed alone"]),
    (["-m", "seed=range(0,9)", "sweep.max_jobs=0"], ["sweep.max_jobs=0", "at least 1"]),
    (["-m", "seed=range(0,3000)", "tracker.jobtype=a"], ["did you mean tracker.job_type?"]),
    (["-m", "seed=1,2", "sweep.zip=${nowhere}"], ["sweep.zip="]),
    (["-m", "seed=1,2", "sweep.max_jobs=${nowhere}"], ["sweep.max_jobs="]),
]


def ask(words):
    asked = read(words)
    return request(asked.overrides, multirun=asked.multirun)


@pytest.mark.parametrize(("words", "parts"), ODD, ids=[" ".join(w)[:40] for w, _ in ODD])
def test_an_odd_request_is_refused_at_once_in_one_message(words, parts):
    with pytest.raises(RequestError) as error:
        ask(words)
    message = str(error.value)
    for part in parts:
        assert part in message
    lines = message.splitlines()
    assert len(lines) == 1 + len(error.value.problems)
    assert all(len(line) < 5000 for line in lines)


BROKEN = {
    "deep": ("x: " + "[" * 100_000, "nested more than 64 levels deep"),
    "doubling": (
        "b0: &b0 [1]\n" + "".join(f"b{n}: &b{n} [*b{n - 1}, *b{n - 1}]\n" for n in range(1, 50)),
        "more than 200,000 values",
    ),
    "torn": ("_target_: {", "line 2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_of_a_users_folder_is_named(tmp_path, name):
    content, part = BROKEN[name]
    file = tmp_path / "more" / "model" / f"{name}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(RequestError) as error:
        request([f"model={name}"], source=Source(extra=tmp_path / "more"))
    [problem] = error.value.problems
    assert problem.key == f"model={name}"
    assert str(file) in problem.message
    assert part in problem.message


def test_a_recorded_configuration_that_doubles_is_refused(tmp_path):
    file = tmp_path / "config.yaml"
    doubles = "".join(f"x{n}: ${{x{n - 1}}}${{x{n - 1}}}\n" for n in range(1, 50))
    file.write_text("x0: aaaa\n" + doubles)
    with pytest.raises(RequestError, match="20,000 characters"):
        recorded(file, [])


def test_a_sweep_may_be_as_large_as_the_limit():
    words = ["seed=range(0,3)", "clip.threshold=1,2", "sweep.max_jobs=6"]
    assert len(request(words, multirun=True).jobs) == 6
    zipped = ["seed=1,2,3", "clip.threshold=1,2,3", "sweep.zip=[seed,clip.threshold]"]
    assert len(request([*zipped, "sweep.max_jobs=3"], multirun=True).jobs) == 3
    # An adaptive sweeper chooses its runs: each value counts once.
    optuna = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=1000", "clip.threshold=interval(1,2)"]
    assert request([*optuna, "sweep.max_jobs=2"], multirun=True).jobs


def test_the_limit_is_part_of_no_runs_identity():
    small, large = (
        request(["seed=1,2", f"sweep.max_jobs={most}"], multirun=True).sweep for most in (2, 3)
    )
    assert small.identity == large.identity
