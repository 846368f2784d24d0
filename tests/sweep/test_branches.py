"""One checkpoint, continued under several thresholds: ``resume=RUN@STEP``."""

import pytest

from runner.cli.main import main
from runner.run_folder.strict_json import read_rows
from tests.kept import assert_same_checkpoint
from tests.launch.ends import read
from tests.process import overriding, run_here

SHORT = ["device=cpu", "tracker=none", "data.batch_size=16", "train.max_duration=10ba"]
SHORT += ["eval.interval=5ba", "model.width=8"]
branches = pytest.mark.xdist_group("branches")  # their parent is trained once


class Later:
    """Changes the threshold of a training after a step."""

    def __init__(self, step: int, threshold: float) -> None:
        self.step, self.threshold = step, threshold

    def on_step(self, trainer, metrics) -> None:
        if metrics.step == self.step:
            trainer.state.mode.threshold = self.threshold


def run(*words, code=0):
    assert main(overriding(SHORT, words)) == code


def rows_of(folder):
    kept = ("train/step", "train/loss", "train/lr", "grad/norm", "clip/", "eval/")
    return [
        {key: value for key, value in row.items() if key.startswith(kept) and "ratio" not in key}
        for row in read_rows(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """The folder of a run with checkpoints after every second step."""
    folder = tmp_path_factory.mktemp("branches") / "parent"
    words = [f"hydra.run.dir={folder}", "checkpoint.interval=2ba", "checkpoint.keep=9"]
    run_here(*overriding(SHORT, words))
    return folder


@branches
@pytest.mark.parametrize("clip", ["norm", "percentile"])
def test_a_branch_is_the_run_whose_threshold_was_changed_then(
    tmp_path, outputs, parent, capsys, clip
):
    mode = [] if clip == "norm" else [f"clip={clip}", "clip.min_steps=1"]
    if mode:
        parent = tmp_path / "other"
        run(f"hydra.run.dir={parent}", *mode, "checkpoint.interval=2ba", "checkpoint.keep=9")
    values = [0.1, 2.0] if clip == "norm" else [5, 90]
    listed = f"clip.threshold={','.join(map(str, values))}"
    run("-m", *mode, f"resume={parent}@6", listed, "sweep.name=branches")
    assert "run 1: finished after 4 steps" in capsys.readouterr().err
    sweep = outputs / "sweeps" / "branches"
    for number, threshold in enumerate(values):
        changed = f"{{_target_:tests.sweep.test_branches.Later,step:6,threshold:{threshold}}}"
        whole = tmp_path / f"whole{number}"
        run(*mode, f"hydra.run.dir={whole}", f"callbacks=[{changed}]")
        expected = [row for row in rows_of(whole) if row["train/step"] > 6]
        assert rows_of(sweep / str(number)) == expected, threshold
        final = "checkpoints/final"
        assert_same_checkpoint(sweep / str(number) / final, whole / final)
        first = next(read_rows(sweep / str(number) / "metrics.jsonl"))
        assert first["throughput/samples_per_s"] == pytest.approx(16 / first["time/step_s"]), (
            threshold
        )
        summary = read(sweep / str(number), "summary.json")
        clipped = [row["clip/clipped"] for row in expected]
        assert summary["clip/ratio_total"] == pytest.approx(sum(clipped) / len(clipped)), threshold
    assert "clip.threshold" in (sweep / "report.html").read_text()
    for word in ("clip.window=3", "clip.norm_type=1", "clip.scales=all") if mode else ():
        branch = tmp_path / word.partition("=")[0]
        run(f"hydra.run.dir={branch}", *mode, f"resume={parent}@6", word)
        assert rows_of(branch)[0]["clip/clipped"] == 0  # its history begins with its first norm


@branches
def test_branches_from_two_steps_are_sweeps_of_their_own(outputs, parent):
    assert main(["-m", f"resume={parent}@6", "clip.threshold=1,0.5"]) == 0
    assert main(["-m", f"resume={parent}@4", "clip=value,adaptive", "clip.threshold=1"]) == 0
    run("-m", "clip.threshold=1,0.5")
    assert len([*(outputs / "sweeps").iterdir()]) == 3


@branches
def test_a_branch_says_what_it_cannot_change(outputs, parent, capsys):
    run(f"resume={parent}@6", "data.batch_size=8", "seed=3", code=2)
    printed = capsys.readouterr().err
    parts = ("data.batch_size=8", "is 16 in the checkpoint", "seed=3", "a branch changes keys of")
    assert all(part in printed for part in parts), printed


@branches
def test_a_branch_may_change_the_learning_rate(outputs, parent):
    run(f"resume={parent}@6", "optimizer.lr=0.01")


@branches
def test_a_branch_from_a_step_without_a_checkpoint_is_refused(outputs, parent, capsys):
    run(f"resume={parent}@5", code=2)
    message = (
        "has no checkpoint 5: checkpoint.interval=2ba saves none at this step  (there are: 2, 4"
    )
    assert message in capsys.readouterr().err


@branches
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_leave_out_the_samples_that_one_process_leaves_out(tmp_path, parent, ranks):
    words = [f"resume={parent}@6", "data.leave_out=[7..8,10]"]
    run(f"hydra.run.dir={tmp_path / 'one'}", *words)
    batch = [f"data.batch_size={16 // ranks}", "data.num_workers=1"]
    spread = ["plugin=ddp", f"plugin.nproc={ranks}", *batch]
    run(f"hydra.run.dir={tmp_path / 'ranks'}", *words, *spread)
    of_one, of_ranks = (
        [row["train/loss"] for row in rows_of(tmp_path / name)] for name in ("one", "ranks")
    )
    assert of_ranks == pytest.approx(of_one, rel=1e-5)
    before = [row["train/loss"] for row in rows_of(parent) if row["train/step"] > 6]
    assert of_one != pytest.approx(before, rel=1e-3)


@branches
def test_what_cannot_be_left_out_is_refused(tmp_path, outputs, parent, capsys):
    for words, message in (
        (["data.leave_out=[7..11]"], "the run has 10 steps"),
        (["data.leave_out=[0]"], "steps are counted from 1"),
        (["data.leave_out=[9..7]"], "numbers and ranges, such as [520..540,600]"),
        (["data.leave_out.samples=[3,5000]"], "the training data has no sample 5000"),
    ):
        run(f"resume={parent}@6", *words, code=2)
        assert message in capsys.readouterr().err, words
    assert not (outputs / "runs").exists()
    branch = tmp_path / "branch"
    saving = ["checkpoint.interval=2ba", f"hydra.run.dir={branch}"]
    run(f"resume={parent}@6", "data.leave_out=[7]", *saving)
    run(f"resume={branch}@8", "data.leave_out=[9]", code=2)
    assert "data.leave_out.steps=[9]" in capsys.readouterr().err
