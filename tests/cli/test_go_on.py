"""A run goes on for longer, or branches, with everything else from its own record."""

import shlex

import pytest
import yaml

from runner.cli.main import main
from runner.config.problem import RequestError
from runner.request.request import request
from runner.run_folder import files
from tests.kept import assert_same_checkpoint

once = pytest.mark.xdist_group("finished run")  # it is trained once

SHORT = ["device=cpu", "tracker=none", "model.width=8", "data.batch_size=16", "log.interval=2"]
SHORT += ["scheduler=constant", "eval.interval=5ba", "checkpoint.interval=2ba", "checkpoint.keep=2"]
NET = "{_target_:tests.cli.test_go_on.Net,width:3}"


class Net:
    """The model of a run whose record names it; it is never made."""


def config_of(run):
    return yaml.safe_load((run / files.CONFIG).read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "one"
    assert main([*SHORT, f"hydra.run.dir={folder}", "train.max_duration=6ba"]) == 0
    return folder


@once
def test_a_longer_run_is_the_run_that_was_as_long_from_the_start(finished, tmp_path, outputs):
    whole = tmp_path / "whole"
    longer = tmp_path / "longer"
    assert main([*SHORT, f"hydra.run.dir={whole}", "train.max_duration=9ba"]) == 0
    words = [f"resume={finished}", "train.max_duration=144sp", f"hydra.run.dir={longer}"]
    assert main(words) == 0  # nine steps, in another unit
    assert_same_checkpoint(longer / "checkpoints" / "final", whole / "checkpoints" / "final")
    before = config_of(finished)
    after = config_of(longer)
    assert {key for key in before if before[key] != after[key]} == {"train", "resume"}
    overrides = yaml.safe_load((longer / files.OVERRIDES).read_text())
    assert overrides[:2] == [f"resume.from={finished}", "train.max_duration=144sp"]


@once
def test_the_command_of_a_finished_run_with_a_longer_duration_names_what_continues_it(
    finished, outputs, capsys
):
    same_folder = [*SHORT, f"hydra.run.dir={finished}"]
    assert main([*same_folder, "train.max_duration=7ba"]) == 2
    printed = capsys.readouterr().err
    assert "holds a run that finished after 6ba; to go on in a new folder: " in printed
    command = shlex.split(printed.partition("python -m runner ")[2])
    assert command == [f"resume={finished}", "train.max_duration=7ba"]
    assert main(command) == 0
    assert main([*same_folder, "train.max_duration=6ba"]) == 2
    assert "holds the record of an earlier run" in capsys.readouterr().err


@once
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("resume={run}", "has come as far already: give a longer train.max_duration"),
        (
            "resume={run} train.max_duration=96sp",
            "one/step_000000006 has come as far already: give",
        ),
        (
            "resume={run} train.max_duration=3ba",
            "train.max_duration=3ba  the checkpoint one/step_0",
        ),
        ("resume={run} train.max_duration=9ba seed=1", "seed=1  is 0 in the checkpoint one/step"),
        ("resume={run} train.max_duration=9ba optimizer=adamw", "AdamW  is torch.optim.SGD in the"),
        (
            "resume={run} train.max_duration=9ba accumulation.steps={{0:1,5ba:2}}",
            "accumulation.steps={0:1,5ba:2}  is 1 in the checkpoint one/step_000000006",
        ),
        ("resume={run}@2", "checkpoint.keep=2 has deleted it  (there are: 4, 6, final)"),
        ("-m resume={run}@2 clip.threshold=1,2", "checkpoint.keep=2 has deleted it  (there are"),
        ("resume={run}@8", "has no checkpoint 8: its newest is that of step 6"),
        ("-m resume={run}@4 clip.threshold=1,2 seed=1", "seed=1  is 0 in the checkpoint one/step"),
        ("resume=lost", "must be auto, never, or the path of a run or checkpoint; there is no"),
    ],
)
def test_what_cannot_go_on_is_refused_once_in_one_sentence(
    finished, words, message, outputs, capsys
):
    assert main(words.format(run=finished).split()) == 2
    printed = capsys.readouterr().err
    assert "(1 problem)" in printed
    assert message in printed
    assert not outputs.exists()


def planted(folder, *words):
    """Write the record of a run that was asked for by these words, and return its folder."""
    [job] = request(["tracker=none", *words]).jobs
    folder.mkdir(parents=True)
    (folder / files.CONFIG).write_text(yaml.safe_dump(job.plain))
    return folder


def over(run, *words):
    [job] = request([f"resume={run}", *words]).jobs
    return job.plain


@pytest.fixture
def with_skip(tmp_path):
    return planted(tmp_path / "run", "clip.skip=sigma", "clip.norm_type=inf", "model.width=9")


def test_what_is_not_typed_stays_as_in_the_record(with_skip):
    recorded = config_of(with_skip)["clip"]
    assert over(with_skip)["clip"] == recorded
    assert over(with_skip, "clip=norm")["clip"] == recorded


def test_another_mode_keeps_the_rule_of_skips_from_the_record(with_skip):
    clip = over(with_skip, "clip=value", "clip.threshold=3")["clip"]
    assert (clip["mode"], clip["threshold"], clip["skip"]["rule"]) == ("value", 3, "sigma")


def test_a_model_that_is_typed_has_its_own_defaults(with_skip):
    assert over(with_skip, "model=cnn")["model"]["width"] == 32


def test_a_recipe_that_is_typed_replaces_the_optimizer_of_the_record(with_skip):
    plain = over(with_skip, "recipe=gpt")
    assert (plain["recipe"], plain["optimizer"]["lr"]) == ("gpt", 0.0006)
    assert "momentum" not in plain["optimizer"]


def test_the_path_of_a_checkpoint_gives_the_record_of_its_run(with_skip):
    checkpoint = with_skip / "checkpoints" / "step_000000002"
    checkpoint.mkdir(parents=True)
    for path in (checkpoint.parent, checkpoint, f"{with_skip}@2"):
        assert over(path)["model"]["width"] == 9


def test_a_run_leaves_its_sweep(tmp_path):
    group = ["tracker.group=mine", "tracker.tags=[mine]"]
    of_sweep = ["sweep.name=mine", "sweep.zip=[seed,data.seed]", "report.baseline=0"]
    run = planted(tmp_path / "mine" / "0", *group, *of_sweep)
    (tmp_path / "mine" / files.SWEEP).write_text("{}")
    plain = over(run)
    assert (plain["sweep"]["name"], plain["sweep"]["zip"]) == (None, [])
    assert (plain["tracker"]["group"], plain["tracker"]["tags"]) == (None, [])
    assert plain["report"]["baseline"] is None


def test_trust_belongs_to_one_command(tmp_path):
    run = planted(tmp_path / "run", "trust=true", "resume.force=true")
    plain = over(run)
    assert (plain["resume"], plain["trust"]) == ({"from": str(run), "force": False}, False)


def test_the_ranks_that_are_there_replace_those_of_the_record(tmp_path, monkeypatch):
    run = planted(tmp_path / "run", "plugin=ddp", "plugin.nproc=4")
    assert over(run)["plugin"]["nproc"] == 4
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert over(run)["plugin"]["nproc"] is None


def test_a_class_of_the_user_in_a_record_is_typed_again_or_trusted(tmp_path):
    run = planted(tmp_path / "run", f"model={NET}")
    with pytest.raises(RequestError, match=r"comes from the run's config\.yaml"):
        over(run)
    for words in (["trust=true"], ["model=tests.cli.test_go_on.Net"]):
        model = over(run, *words)["model"]
    assert model.items() >= {"_target_": "tests.cli.test_go_on.Net", "width": 3}.items()
    with pytest.raises(RequestError, match=r"\(1 problem\)[^(]*comes from the run's config.yaml"):
        request([f"resume={run}@2", "clip.threshold=1,2"], multirun=True)


def test_a_secret_is_given_again(tmp_path):
    run = planted(tmp_path / "run", "+model.api_key=hush-hush-1")
    with pytest.raises(RequestError, match="is a secret, which is not recorded: give it again"):
        over(run)
    assert over(run, "model.api_key=hush-hush-2")["model"]["width"] == 32
