"""What only torch can find out about a request is reported before anything is created."""

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from runner.cli.main import main
from runner.data import Data
from runner.request.request import request
from runner.run_folder.status import objective_of
from runner.train import build, preflight
from runner.train.logged import logged
from runner.train.run import execute
from tests.distributed.training import Rows
from tests.process import overriding

ODD = f"data._target_={__name__}"
STEP_LR = "scheduler._target_=torch.optim.lr_scheduler.StepLR"
TEXT = "model=gpt data=text"
LINEAR = "model=torch.nn.Linear model.in_features=3 model."
ADAFACTOR = f"{TEXT} optimizer=adafactor plugin.nproc=2"

WRONG = [
    (
        "model._target_=runner.models.cnn.DigitsCN data.test_fraction=2 "
        "optimizer._target_=tests.refusing.listed optimizer.lr=1 clip=adaptive "
        f"{STEP_LR} callbacks=[{{_target_:tests.train.test_callbacks.Note}}]",
        "(5 problems)|model._target_|did you mean DigitsCNN?|data.test_fraction=2|TypeError|"
        "step_size|returned list, no Optimizer|test_callbacks.Note",
    ),
    (
        "data.drop_last=true data.batch_size=2000 train.max_duration=5000tok clip=adaptive "
        "clip.exclude=[haed.*] optimizer._target_=tests.refusing.Optimizer optimizer.lr=-1",
        "(5 problems)|data.batch_size=2000|1437 samples|max_duration=5000tok|ba|clip.exclude|"
        "matches no parameter|lr is negative|needs the number of steps",
    ),
    (
        "-m data.test_fraction=0.1,2 sweep.objective=eval/acc",
        "in the job data.test_fraction=2|sweep.objective=eval/acc|mean eval/accuracy?",
    ),
    ("data=csv data.path=nope.csv data.target=label", "  data.path=nope.csv  there is no file /"),
    ("scheduler=wsd scheduler.warmup_steps=-1", "  scheduler.warmup_steps=-1  warmup_steps must"),
    ("optimizer.momentum=-1", "  optimizer.momentum=-1  Invalid momentum value: -1"),
    ("optimizer=adamw optimizer.betas=[0.9,1.5]", "  optimizer.betas=[0.9,1.5]  Invalid beta"),
    (f"{TEXT} data.path=5", "data._target_|refused its arguments: TypeError"),
    (f"{ODD}.named", "data._target_|a dict with the keys 'image', 'label'|collate_fn"),
    (f"{ODD}.endless", "scheduler._target_|a stream has epochs of unknown length"),
    (f"{ODD}.regression loss._target_=torch.nn.NLLLoss", "loss._target_|[B, 10]"),
    (f"{ODD}.numbers", "loss._target_=null|such as torch.nn.MSELoss"),
    (
        f"{ODD}.regression loss._target_=torch.nn.MSELoss eval.metrics=[f1]",
        "eval.metrics=f1|does not fit: TypeError",
    ),
    # The loss of the first two samples, and all targets that are in memory
    (
        f"data={__name__}.five {LINEAR}out_features=2",
        "model._target_=torch.nn.Linear  gives 2 classes, and targets go to 4",
    ),
    (
        f"data={__name__}.five {LINEAR}out_features=2 loss=torch.nn.CrossEntropyLoss",
        "gives 2 classes, and targets go to 4",
    ),
    (
        f"{LINEAR}out_features=2 data={__name__}.two_parts",
        "gives 2 classes, and targets go to 4",
    ),
    (
        f"{LINEAR}out_features=5 data={__name__}.labels_left_out",
        "a target is -1, and cross entropy ignores -100 alone",
    ),
    (
        f"{LINEAR}out_features=2 loss=torch.nn.MultiMarginLoss data={__name__}.last_classes",
        "loss._target_=torch.nn.MultiMarginLoss|does not take a sample of|[B, 3], [B]",
    ),
    (
        f"{LINEAR}out_features=2 loss=torch.nn.MSELoss data={__name__}.floats",
        "loss._target_=torch.nn.MSELoss|compares outputs [B, 2] with targets [B, 1]|the same shape",
    ),
    (
        f"{LINEAR}out_features=1 loss=torch.nn.MSELoss data={__name__}.flat",
        "compares outputs [B, 1] with targets [B], which would be broadcast",
    ),
    (
        f"{LINEAR}out_features=1 loss={__name__}.squares data={__name__}.flat",
        "outputs [B, 1] with targets [B], so each output with all targets: give both the same",
    ),
    (
        f"data={__name__}.five {LINEAR}out_features=5 loss={__name__}.each_item",
        "(1 problem)|the criterion each_item has shape [2, 5]: reduce it to one number, such as",
    ),
    (
        f"data={__name__}.five {LINEAR}out_features=5 eval.metrics=[mse]",
        "eval.metrics=mse|does not fit",
    ),
    (f"{ADAFACTOR} plugin=fsdp", "(1 problem)|steps whole parameters: use plugin=ddp"),
    ("optimizer=muon", "(1 problem)|has no hidden matrix"),
    (
        "early_stopping.patience=2 early_stopping.metric=eval/f1",
        "early_stopping.metric=eval/f1|is no metric of evaluations",
    ),
    ("clip=update optimizer=sgd", "optimizer._target_|clip=update needs|optimizer=adamw"),
    (
        "clip=value clip.when=backward clip.step_in_backward=true clip.nonfinite=error "
        "optimizer=adamw optimizer._target_=timm.optim.Lamb",
        "optimizer._target_|Lamb cannot step one parameter after the other",
    ),
    (
        "plugin=tensor plugin.nproc=2 precision=fp16 device=cuda telemetry.noise_scale=true",
        "(4 problems)|plugin.tp_plan|DigitsCNN has no plan|fp16 needs a GPU|device=cuda|"
        "telemetry.noise_scale=true",
    ),
    (
        f"{TEXT} plugin=tensor plugin.nproc=2 plugin.sequence_parallel=true "
        "data.sequence_length=63",
        "plugin.sequence_parallel=true|63|2 ranks",
    ),
    (
        f"{TEXT} plugin=pipeline plugin.nproc=4 model.layers=2 data.batch_size=16 "
        "plugin.schedule=interleaved_1f1b",
        "plugin.pp_size=4|8 stages|only 5 parts",
    ),
    ("plugin=ddp plugin.nproc=4096", "plugin.nproc=4096|at most"),
    ("plugin=moe plugin.nproc=2", "plugin.ep_size=2|has no experts to spread|plugin=ddp"),
    (
        f"model={__name__}.HalfNet data=digits plugin=fsdp plugin.nproc=2",
        "plugin.name=fsdp|torch.float32 (1.weight, 1.bias)|torch.bfloat16 (2.weight, 2.bias)|ddp",
    ),
]
WRONG_IN_SIX_RANKS = [
    ("plugin=single", "torchrun started 6|plugin=ddp"),
    (
        f"{TEXT} plugin=hybrid plugin.tp_size=2 plugin.pp_size=2",
        "(1 problem)|plugin.tp_size=2|6 ranks|tp_size 2 x pp_size 2 = 4",
    ),
    ("plugin=moe plugin.ep_size=4 model=moe data=text", "plugin.ep_size=4"),
]


class HalfNet(torch.nn.Sequential):
    def __init__(self):
        linear = torch.nn.Linear(64, 10)
        super().__init__(torch.nn.Flatten(), linear, torch.nn.Linear(10, 10).bfloat16())


class Repeated(Dataset):
    """Eight times the same sample."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.sample


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1, 8, 8), 0


def both(dataset):
    return Data(dataset, dataset, items="samples")


def endless():
    return both(Endless())


def named():
    return both(Repeated({"image": torch.zeros(1, 8, 8), "label": 0}))


def regression():
    return both(TensorDataset(torch.zeros(8, 1, 8, 8), torch.zeros(8, 10)))


def numbers():
    return both(TensorDataset(torch.zeros(8, 1, 8, 8), torch.arange(8.0).view(8, 1)))


def vectors(targets):
    return both(TensorDataset(torch.zeros(len(targets), 3), targets))


def five():
    return vectors(torch.tensor([0, 1, 2, 3, 4]))


def two_parts():
    train = TensorDataset(torch.zeros(2, 3), torch.tensor([0, 1]))
    return Data(train, five().test, items="samples")


def labels_left_out():
    return vectors(torch.tensor([0, 1, -100, -1]))


def last_classes():
    return vectors(torch.tensor([1, 4, 1]))


def floats():
    return vectors(torch.zeros(4, 1))


def flat():
    return vectors(torch.zeros(4))


def each_item(outputs, targets):
    return (outputs - targets[:, None]) ** 2


def squares(outputs, targets):
    return ((outputs.float() - targets * 2) ** 2).mean()


def squeezed(outputs, targets):
    return squares(outputs.squeeze(1), targets)


def columns(outputs, targets):
    return squares(outputs, targets[:, None])


def ordered(outputs, targets):
    pairs = (targets[:, None] - targets[None, :]).sign()
    return torch.relu(-(outputs - outputs.T) * pairs).sum() / len(targets)


@pytest.mark.parametrize(
    ("words", "parts"), WRONG + WRONG_IN_SIX_RANKS, ids=lambda value: value[:50]
)
def test_a_wrong_request_is_refused_before_anything_is_created(
    words, parts, outputs, capfd, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if (words, parts) in WRONG_IN_SIX_RANKS:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "6")
    assert main(words.split()) == 2
    message = capfd.readouterr().err
    assert [part for part in parts.split("|") if part not in message] == [], message
    assert "Traceback" not in message
    assert not outputs.exists()


def config(words=""):
    small = ["train.max_duration=1ba", "tracker=none", "device=cpu"]
    (job,) = request(overriding(small, words.split())).jobs
    return job.config


def test_the_metrics_that_an_objective_may_name_are_those_of_a_run():
    rows = Rows()
    configuration = config(
        "model=lstm data=synthetic data.kind=tokens data.samples=8 clip.what_if=[0.5] "
        "telemetry.per_layer=true"
    )
    summary = execute(configuration, [rows])
    written = {key for key in rows.rows[-1] if not key.startswith("grad/norm/")} - {"train/step"}
    assert {"eval/accuracy", "clip/threshold", "clip/what_if/0.5", "train/tokens"} <= written
    names = logged(configuration, build.make_data(configuration.data))
    assert sorted(names) == sorted(written | {"wall_s"})
    assert all(objective_of(summary, key) is not None for key in names)


@pytest.mark.parametrize("loss", ["squeezed", "columns", "ordered"])
def test_a_loss_that_compares_what_belongs_together_is_accepted(loss):
    names = f"loss={__name__}.{loss} data={__name__}.flat"
    preflight.check(config(f"{LINEAR}out_features=1 {names} loss.items=samples"))


def test_a_model_that_the_meta_device_cannot_make_is_left_to_the_run():
    preflight.check(config("model._target_=tests.refusing.Ramp"))


def test_an_open_size_takes_idle_gpus(monkeypatch):
    for words, counts in {
        "plugin=single": (1, 1, 1),
        "plugin=moe plugin.ep_size=2": (2, 8, 6),
        "plugin=hybrid plugin.tp_size=2 plugin.pp_size=2": (4, 8, 4),
    }.items():
        configuration = config(f"{words} device=auto")
        for count, ranks in zip((0, 8, 6), counts, strict=True):
            monkeypatch.setattr(build.torch.cuda, "device_count", lambda count=count: count)
            assert build.ranks_of(configuration) == ranks
    assert build.ranks_of(config("plugin=hybrid plugin.tp_size=2")) == 2  # on a CPU
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert build.ranks_of(configuration) == 5
