"""What only torch can tell about a request is told before anything is created."""

from functools import partial

import pytest
import torch

from runner.cli.main import main
from runner.train import preflight

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")

LBFGS = ["~optimizer.weight_decay", "~optimizer.nesterov"]
IN_BACKWARD = [
    *("clip=value", "clip.when=backward"),
    *("clip.step_in_backward=true", "clip.nonfinite=error"),
]
TEXT = ["model=gpt", "data=text"]
UNKNOWN = "plugin.tp_plan={blocks.*.mlp.upp:colwise}"
SEQUENCE = "plugin.sequence_parallel=true"
TWICE = "plugin.schedule=interleaved_1f1b"
BARE = ["~data.seed", "~data.test_fraction"]
REGRESSION = "tests.odd_data.regression"
WRONG = [
    (["model._target_=runner.models.cnn.DigitsCN"], ["model._target_", "DigitsCN"]),
    (["model._target_=no_such_package.Net"], ["model._target_", "no_such_package"]),
    (["model._target_=tests.odd_data.Net"], ["'Net' is importable from module 'tests.odd"]),
    (
        ["+model.widht=3"],
        ["(1 problem)", "model.widht=3", "did you mean width?", "Remove it with ~model.widht."],
    ),
    (
        ["model._target_=tests.verify.nets.Single"],
        ["(2 problems)", "model.num_classes=10  ", "model.width=", "with ~model.num_classes."],
    ),
    (["data.test_fraction=0"], ["data.test_fraction=0", "must lie between 0 and 1, not 0"]),
    (["model._target_=math.sqrt", "~model.width", "~model.num_classes"], ["model._target_"]),
    (
        ["model=gpt", "data=text", "model.heads=5"],
        ["model.heads=5", "5 heads do not divide a width of 128"],
    ),
    (["model=moe", "data=text", "model.top_k=9"], ["model.top_k=9", "the 8 experts"]),
    (["model=gpt"], ["model._target_", "does not take a sample of", "digits"]),
    (["model=gpt"], ["(1x8x8, float32)", "model=gpt goes with data=text;", "digits goes with mod"]),
    (["data=text"], ["model._target_", "does not take a sample of", "text"]),
    (
        ["data=text", "model=resnet34"],
        ["resnet34 goes with data=cifar10 data.root=", "data=text goes with model=gpt"],
    ),
    (
        ["data=synthetic", "model=lstm"],
        ["lstm goes with data=text; ", "data=synthetic data.kind=tokens goes with model=gpt"],
    ),
    (
        ["data._target_=tests.odd_data.named", *BARE],
        ["data._target_", "a dict with the keys 'image', 'label'", "collate_fn", "loss(outputs, "],
    ),
    (
        ["-m", "seed=1,2", "sweep.objective=eval/acc"],
        ["sweep.objective=eval/acc", "did you mean eval/accuracy?"],
    ),
    (
        [
            *("-m", "seed=1,2", f"data._target_={REGRESSION}", *BARE),
            *("loss._target_=torch.nn.MSELoss", "sweep.objective=eval/accuracy"),
        ],
        ["sweep.objective=eval/accuracy  is not logged by this run", "(it logs eval/loss, train/"],
    ),
    (
        ["-m", "seed=1,2", "sweep.objective=clip/threshold", "clip=none"],
        ["sweep.objective=clip/threshold  is not logged"],
    ),
    (["+optimizer.dampening=-1", "optimizer.nesterov=true"], ["optimizer.dampening=-1", "zero"]),
    (["optimizer=adam", "optimizer.betas=[0.9,1]"], ["optimizer.betas=[0.9,1]", "Invalid beta"]),
    (["+optimizer.maximize=5"], ["optimizer.maximize=5", "must be true or false"]),
    (["+optimizer.dampening=abc"], ["optimizer.dampening=abc", "must be a number"]),
    (["+optimizer.dampening=nan"], ["optimizer.dampening=nan", "must be a number"]),
    (["scheduler=staircase", "scheduler.factor=2"], ["scheduler.factor=2", "must lie in (0, 1]"]),
    (
        ["optimizer._target_=tests.refusing.Optimizer", "optimizer.lr=-1", "optimizer.momentum=-1"],
        ["(2 problems)", "optimizer.lr=-1", "lr is negative", "optimizer.momentum=-1", "momentum"],
    ),
    (["optimizer._target_=torch.optim.SDG"], ["optimizer._target_", "SDG"]),
    (["+optimizer.betas=[0.9,0.99]"], ["optimizer.betas=[0.9,0.99]", "no such argument"]),
    (
        ["optimizer._target_=tests.refusing.listed"],
        ["optimizer._target_", "listed returned list, not a torch.optim.Optimizer"],
    ),
    (
        ["scheduler._target_=torch.optim.lr_scheduler.StepLR", "~scheduler.eta_min"],
        ["scheduler._target_", "step_size"],
    ),
    (
        ["scheduler._target_=torch.optim.lr_scheduler.StepLR", "+scheduler.step_size=3"],
        ["scheduler.eta_min=", "has no such argument", "Remove it with ~scheduler.eta_min."],
    ),
    (["data=cifar10", "data.root=/no/such"], ["data.root=/no/such  data.root", "data.download"]),
    (["data=text", "model=gpt", "data.path=/no/such"], ["data.path=/no/such  data.path", "exist"]),
    (["data=text", "model=gpt", "data.path=5"], ["data.path=5", "must be text or null"]),
    (["data._target_=builtins.dict", "~data.seed", "~data.test_fraction"], ["data", "dict"]),
    (["data.test_fraction=2"], ["data.test_fraction=2", "runner.data.digits.digits refuses it"]),
    (["clip=adaptive", "clip.exclude=[haed.*]"], ["clip.exclude", "haed", "matches no parameter"]),
    (["clip=adaptive", "clip.units={haed.*:1}"], ["clip.units={haed.*:1}", "matches no parameter"]),
    (
        ["clip=update", "optimizer=sgd"],
        ["optimizer._target_=torch.optim.SGD", "clip=update needs", "choose optimizer=adamw"],
    ),
    (
        [*IN_BACKWARD, "optimizer._target_=tests.refusing.Counting"],
        ["optimizer._target_", "Counting takes other steps one parameter after the other"],
    ),
    (
        ["clip=spike", "optimizer=adagrad"],
        ["optimizer._target_=torch.optim.Adagrad", "clip=spike needs", "Adagrad keeps none"],
    ),
    (
        ["clip=adaptive", "clip.units={head.*:[0,1]}"],
        ["clip.units={head.*:[0,1]}", "head.* names dimension 1 of head.bias, whose shape is [10]"],
    ),
    (
        ["+optimizer.dampening=x", "data.test_fraction=2"],
        ["2 problems", "optimizer.dampening=x", "data.test_fraction=2"],
    ),
    (["train.max_duration=5000tok", "scheduler=constant"], ["train.max_duration=5000tok", "ba"]),
    (["eval.interval=5tok"], ["eval.interval=5tok", "no tokens"]),
    (["data.drop_last=true", "data.batch_size=2000"], ["data.batch_size=2000", "1437 samples"]),
    (["data._target_=tests.odd_data.pictures", *BARE], ["model._target_", "PIL"]),
    (
        ["data._target_=tests.odd_data.endless", *BARE],
        ["scheduler._target_", "a stream has epochs of unknown length", "give train.max_duration"],
    ),
    (["data._target_=tests.odd_data.nothing", *BARE], ["data.batch_size", "0 samples"]),
    (
        ["optimizer._target_=torch.optim.LBFGS", "~optimizer.momentum", *LBFGS],
        ["optimizer._target_", "closure"],
    ),
    (
        ["scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau", "~scheduler.eta_min"],
        ["scheduler._target_", "asks for metrics"],
    ),
    (["-m", "data.test_fraction=0.1,2"], ["refuses it", "in the job data.test_fraction=2"]),
]
WRONG_ON_A_CPU = [
    (
        ["plugin=fsdp", "plugin.nproc=4", "plugin.dp_replicate=3"],
        ["plugin.dp_replicate=3", "4 ranks"],
    ),
    (["plugin=tensor", "plugin.nproc=2"], ["plugin.tp_plan", "DigitsCNN has no plan"]),
    ([*TEXT, "plugin=tensor", "plugin.tp_size=8"], ["plugin.tp_size=8", "4 heads"]),
    ([*TEXT, "plugin=tensor", "plugin.nproc=2", UNKNOWN], ["matches no module", "blocks.*.mlp.up"]),
    (
        [*TEXT, "plugin=tensor", "plugin.nproc=2", SEQUENCE, "data.sequence_length=63"],
        ["plugin.sequence_parallel=true", "63", "2 ranks"],
    ),
    (
        ["model=awd_lstm", "data=text", "plugin=pipeline", "plugin.nproc=2"],
        ["plugin.pp_size=2", "AWDLSTM cannot be cut"],
    ),
    (
        [*TEXT, "plugin=pipeline", "plugin.nproc=4", "model.layers=2", "data.batch_size=16", TWICE],
        ["plugin.pp_size=4", "8 stages", "only 5 parts"],
    ),
    (
        [*TEXT, "plugin=pipeline", "plugin.nproc=2", "plugin.split=[block.1]"],
        ["plugin.split=[block.1]", "blocks.1"],
    ),
    ([*TEXT, "plugin=moe", "plugin.ep_size=2"], ["plugin.ep_size=2", "GPT has no experts"]),
    (["precision=fp16"], ["precision", "fp16", "GPU", "bf16"]),
    (["device=cuda"], ["device=cuda", "cpu"]),
    (["plugin=ddp", "plugin.nproc=4096"], ["plugin.nproc=4096", "at most"]),
    (
        ["plugin=fsdp", "plugin.nproc=2", "plugin.sync_batchnorm=true", "device=cpu"],
        ["plugin.sync_batchnorm=true", "SyncBatchNorm computes on GPUs", "has no batch norm layer"],
    ),
]


def assert_refused(words, said, outputs, capfd):
    """Assert that a request is refused in one message with these parts, and creates nothing."""
    assert main(words) == 2
    message = capfd.readouterr().err
    for part in said:
        assert part in message
    assert "Traceback" not in message
    assert not outputs.exists()


@pytest.mark.parametrize(("words", "said"), WRONG, ids=lambda value: " ".join(value)[:50])
def test_wrong(words, said, outputs, capfd):
    assert_refused(words, said, outputs, capfd)


@CPU_ONLY
@pytest.mark.parametrize(("words", "said"), WRONG_ON_A_CPU, ids=lambda value: " ".join(value)[:50])
def test_wrong_on_a_cpu(words, said, outputs, capfd):
    assert_refused(words, said, outputs, capfd)


def test_one_process_under_several_ranks(outputs, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = ["plugin=single", "2 ranks", "plugin=ddp"]
    assert_refused(["plugin=single"], said, outputs, capfd)


@CPU_ONLY
def test_ranks_that_the_sizes_do_not_multiply_to(outputs, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")
    words = ["plugin=hybrid", "plugin.tp_size=2", "plugin.pp_size=2", *TEXT]
    said = ["(1 problem)", "plugin.nproc=6", "tp_size 2 x pp_size 2 = 4", "start 4 or 8 ranks by"]
    assert_refused(words, said, outputs, capfd)
    words = ["plugin=moe", "plugin.ep_size=4", "model=moe", "data=text"]
    assert_refused(words, ["(1 problem)", "plugin.ep_size=4  4 ranks"], outputs, capfd)


def test_the_error_of_a_broken_model_is_its_own(monkeypatch):
    """A model that the meta device cannot make is left to the real one."""

    def unable(*args, **kwargs):
        raise NotImplementedError("no kernel for the meta device")

    from runner.compose.request import request

    (job,) = request([], multirun=False).jobs
    monkeypatch.setattr(preflight.build, "maker", lambda target: partial(unable))
    with pytest.raises(Exception, match="kernel") as caught:
        preflight.check(job.config)
    assert "model._target_" not in str(caught.value)


def test_a_length_that_does_not_fit_is_no_matter_of_other_data(outputs, capfd):
    words = ["model=gpt", "data=text", "data.sequence_length=256"]
    assert main(words) == 2
    message = capfd.readouterr().err
    assert "256 tokens do not fit a context of 128" in message
    assert "goes with" not in message
