"""Requests that cannot be run: exit 2, one message, no traceback, nothing created.

Each is a process of its own, since that is what a user sees. None needs torch to be found out.
"""

import pytest

from tests.mode_names import LISTED
from tests.process import python

pytestmark = pytest.mark.usefixtures("outputs")

# What python -m runner does, and the promise that no torch was needed for it.
PROGRAM = """
import sys
from runner.cli.main import main
code = main(sys.argv[1:])
assert 'torch' not in sys.modules, 'torch was imported'
raise SystemExit(code)
"""

# The words, and what the message must say: the key, the value, what is allowed.
WRONG = [
    # Keys.
    ("clip.treshold=1", ["clip.treshold=1", "unknown key", "clip.threshold?", "norm_type"]),
    ("+clip.treshold=1", ["clip.treshold=1", "unknown key", "clip.threshold?"]),
    ("++clip.treshold=1", ["clip.treshold=1", "unknown key", "clip.threshold?"]),
    ("+sed=1", ["sed=1", "unknown key", "seed?"]),
    ("threshold=0.1", ["threshold=0.1", "unknown key", "clip.threshold?"]),
    ("lr=0.1", ["lr=0.1", "unknown key", "optimizer.lr?"]),
    ("max_grad_norm=1", ["max_grad_norm=1", "clip.threshold?"]),
    ("trainer.max_duration=1ep", ["trainer.max_duration=1ep", "train.max_duration?"]),
    ("clip.threshold.low=1", ["clip.threshold.low=1", "unknown key"]),
    ("clip={treshold:1}", ["clip.treshold=1", "clip.threshold?"]),
    ("model.widht=8", ["model.widht=8", "model.width?", "_target_"]),
    ("+train.warmup.steps=3", ["train.warmup.steps=3", "unknown key"]),
    ("clip=adaptive ~clip.eps", ["clip.eps", "no value given", "greater than 0"]),
    ("clip.eps=1", ["clip.eps=1", "is an option of clip=adaptive"]),
    ("~clip.epz", ["clip.epz", "unknown key", "clip.eps?"]),
    ("+seed=1", ["+seed=1", "exists already", "seed=VALUE"]),
    ("hydra.rnu.dir=x", ["hydra.rnu.dir=x", "no such key", "--cfg hydra"]),
    # Options of groups.
    (
        "clip=nrom",
        ["clip=nrom", "norm?", LISTED],
    ),
    ("clip=", ["clip=''", LISTED]),
    (
        "clip=[norm,value]",
        ["clip=[norm,value]", LISTED],
    ),
    ("+clip=norm", ["+clip=norm", "leave out the +"]),
    ("~clip", ["~clip", LISTED]),
    ("cilp=norm", ["cilp=norm", "unknown key", "clip?"]),
    (
        "plugin=dpp plugin.nproc=2",
        [
            "(1 problem)",
            "plugin=dpp",
            "ddp?",
            "ddp, fsdp, hybrid, moe, pipeline, single, tensor, zero",
        ],
    ),
    ("plugin=tp", ["plugin=tp", "tensor?"]),
    ("accumulation=x3", ["accumulation=x3", "none, x2, x4, x8"]),
    ("precision=half", ["precision=half", "fp16?", "bf16, fp16, fp32"]),
    (
        "optimizer=adma",
        ["optimizer=adma", "adam", "adafactor, adagrad, adam, adamw, lion, muon, rmsprop, sgd"],
    ),
    ("recipe=cifar10_resnet43", ["recipe=cifar10_resnet43", "cifar10_resnet34?", "accumulate_4"]),
    ("hydra/launcher=slurm", ["hydra/launcher=slurm", "basic"]),
    # Types and ranges.
    ("clip.threshold=abc", ["clip.threshold=abc", "finite number greater than 0"]),
    ("clip.threshold=0", ["clip.threshold=0 ", "finite number greater than 0"]),
    ("clip.threshold=-1", ["clip.threshold=-1", "finite number greater than 0"]),
    ("clip.threshold=nan", ["clip.threshold=nan", "finite number greater than 0"]),
    ("clip.threshold=inf", ["clip.threshold=inf", "finite number greater than 0"]),
    ("clip.threshold='1.0'", ["clip.threshold='1.0'", "finite number greater than 0"]),
    ("clip.threshold=true", ["clip.threshold=true", "finite number greater than 0"]),
    ("clip.norm_type=3", ["clip.norm_type=3", "1, 2 or inf"]),
    ("clip.nonfinite=raise", ["clip.nonfinite=raise", "skip, error, ignore"]),
    ("clip=adaptive clip.exclude=head", ["clip.exclude=head", "auto", "[a,b]"]),
    (
        "clip.mode=nrom",
        ["clip.mode=nrom", "norm?", LISTED],
    ),
    ("accumulation.steps=0", ["accumulation.steps=0", "integer of at least 1"]),
    ("accumulation.steps=1.5", ["accumulation.steps=1.5", "integer of at least 1"]),
    ("data.batch_size=0", ["data.batch_size=0", "integer of at least 1"]),
    ("data.num_workers=-1", ["data.num_workers=-1", "integer of at least 0"]),
    ("data.drop_last=1", ["data.drop_last=1", "true or false"]),
    ("train.max_duration=3", ["train.max_duration=3", "ep (epochs)", "ba (optimizer steps)"]),
    ("train.max_duration=0ep", ["train.max_duration=0ep", "at least 1"]),
    ("train.max_duration=3weeks", ["train.max_duration=3weeks", "tok (tokens)"]),
    ("eval.interval=-1ep", ["eval.interval=-1ep", "sp (samples)"]),
    ("seed=-1", ["seed=-1", "integer of at least 0"]),
    ("seed=1.5", ["seed=1.5", "integer of at least 0"]),
    ("device=gpu", ["device=gpu", "auto, cpu, cuda", "did you mean cuda?"]),
    ("log.interval=0", ["log.interval=0", "integer of at least 1"]),
    ("telemetry.per_layer=on", ["telemetry.per_layer=on", "true or false"]),
    ("telemetry.worst_layers=-1", ["telemetry.worst_layers=-1", "integer of at least 0"]),
    (
        "telemetry.worst_layers=2 clip.norm_type=inf",
        ["telemetry.worst_layers=2", "clip.norm_type=2, not inf"],
    ),
    ("telemetry.noise_scale=true", ["telemetry.noise_scale=true", "accumulation.steps=2"]),
    (
        "telemetry.noise_scale=true plugin=tensor plugin.nproc=2 model=gpt data=text",
        ["telemetry.noise_scale=true", "ddp, fsdp or zero, not plugin=tensor"],
    ),
    ("launch.timeout=0", ["launch.timeout=0", "greater than 0"]),
    ("tracker.mode=on", ["tracker.mode=on", "auto, online, offline, disabled"]),
    ("tracker.tags=a", ["tracker.tags=a", "list of texts"]),
    ("sweep.name=a/b", ["sweep.name=a/b", "name of a folder"]),
    ("train=5", ["train=5", "max_duration"]),
    ("plugin.nproc=0 plugin=ddp", ["plugin.nproc=0", "at least 1"]),
    ("plugin=tensor plugin.tp_size=0", ["plugin.tp_size=0", "at least 1"]),
    ("plugin=pipeline plugin.schedule=1f1d", ["plugin.schedule=1f1d", "1f1b?", "gpipe, 1f1b"]),
    ("plugin=zero plugin.zero_stage=4", ["plugin.zero_stage=4", "at most 3"]),
    ("plugin=fsdp plugin.param_dtype=half", ["plugin.param_dtype=half", "fp16?", "bf16, fp16"]),
    (
        "plugin=tensor plugin.tp_plan={blocks.*.up:colwse}",
        ["plugin.tp_plan={blocks.*.up:colwse}", "colwise?", "split_sequence"],
    ),
    (
        "plugin=tensor plugin.tp_plan=/nowhere/plan.yaml",
        ["plugin.tp_plan=/nowhere/plan.yaml", "there is no file /nowhere/plan.yaml"],
    ),
    (
        "verify.modes=[norm,valeu]",
        ["verify.modes=[norm,valeu]", LISTED],
    ),
    ("verify.dtype=fp64", ["verify.dtype=fp64", "float64?"]),
    ("tensor_parallel_size=2", ["tensor_parallel_size=2", "plugin.tp_size?"]),
    ("model._target_=resnet", ["model._target_=resnet", "full name"]),
    # Arguments of a target that its file of conf/ names.
    ("optimizer.lr=1e-3x", ["optimizer.lr=1e-3x", "finite number of at least 0"]),
    ("optimizer.lr=null", ["optimizer.lr=null", "finite number of at least 0"]),
    ("optimizer.lr=-0.1", ["optimizer.lr=-0.1", "finite number of at least 0"]),
    ("optimizer.lr=inf", ["optimizer.lr=inf", "finite number of at least 0"]),
    ("optimizer.nesterov=1", ["optimizer.nesterov=1", "true or false"]),
    ("optimizer=adam optimizer.betas=0.9", ["optimizer.betas=0.9", "list such as [0.9,0.999]"]),
    ("model.width=abc", ["model.width=abc", "integer of at least 0"]),
    ("model=gpt model.dropout=no", ["model.dropout=no", "finite number of at least 0"]),
    ("scheduler.eta_min=nan", ["scheduler.eta_min=nan", "finite number of at least 0"]),
    ("data.test_fraction=half", ["data.test_fraction=half", "finite number of at least 0"]),
    ("data=synthetic data.shape=[8,x]", ["data.shape=[8,x]", "list such as [1,8,8]"]),
    ("-m optimizer.lr=0.1,-1", ["optimizer.lr=-1", "in the job optimizer.lr=-1"]),
    ("recipe=gpt optimizer.lr=null", ["optimizer.lr=null", "finite number of at least 0"]),
    # Missing values and references.
    ("model.width=???", ["model.width=???", "no value given"]),
    ("train.max_duration=???", ["train.max_duration=???", "no value given", "ep (epochs)"]),
    ("model.width=${nowhere}", ["model.width=${nowhere}", "'nowhere' not found"]),
    # Combinations.
    ("clip=none clip.threshold=1", ["clip.threshold=1", "clip=none"]),
    ("clip.threshold=null", ["clip.threshold=null", "clip=norm needs"]),
    ("plugin=single plugin.nproc=2", ["plugin.nproc=2", "plugin=ddp"]),
    ("plugin=ddp plugin.tp_size=2", ["plugin.tp_size=2", "plugin=ddp", "plugin=tensor or"]),
    ("plugin.pp_size=2", ["plugin.pp_size=2", "plugin=single", "plugin=pipeline or"]),
    ("plugin=ddp plugin.dp_size=2", ["plugin.dp_size=2", "give plugin.nproc=2"]),
    (
        "plugin=hybrid plugin.nproc=6 plugin.dp_size=2 plugin.tp_size=2 plugin.pp_size=2",
        ["plugin.nproc=6", "dp_size 2 x tp_size 2 x pp_size 2 = 8", "plugin.nproc=8"],
    ),
    ("plugin=moe plugin.ep_size=3 plugin.dp_size=4", ["plugin.ep_size=3", "1, 2 or 4"]),
    (
        "plugin=hybrid plugin.sequence_parallel=true",
        ["plugin.sequence_parallel=true", "plugin.tp_size"],
    ),
    (
        "plugin=pipeline plugin.pp_size=4 plugin.num_microbatches=2",
        ["plugin.num_microbatches=2", "4 stages", "plugin.schedule=gpipe"],
    ),
    (
        "plugin=pipeline plugin.pp_size=4 data.batch_size=2",
        ["data.batch_size=2", "must be 4 or more", "plugin.num_microbatches"],
    ),
    ("plugin=zero plugin.cpu_offload=true", ["plugin.cpu_offload=true", "stages 2 and 3"]),
    (
        "plugin=single plugin.sync_batchnorm=true",
        ["plugin.sync_batchnorm=true", "has no meaning under plugin=single", "plugin=ddp"],
    ),
    # Words and flags.
    ("norm", ["norm", "KEY=VALUE", "clip=norm?"]),
    ("=3", ["='3'", "no key"]),
    ("seed=(", ["seed=(", "cannot be read", "quotes"]),
    ("--fro", ["--fro", "unknown flag", "--help"]),
    ("--cfg everything", ["--cfg", "everything", "job"]),
    ("--cfg job -m", ["-m --cfg", "only one"]),
    ("--resolve", ["--resolve", "--cfg"]),
    ("--config-dir /nowhere", ["--config-dir=/nowhere", "folder that exists"]),
    ("--config-name foo", ["--config-name=foo", "there is no foo.yaml in", "config"]),
    ("--config-name confg seed=1", ["--config-name=confg", "did you mean config?"]),
    ("--config-name confg.yaml", ["there is no confg.yaml in", "did you mean config?"]),
    ("--help --config-name foo", ["--config-name=foo", "there is no foo.yaml in"]),
    ("--cfg job --config-name foo", ["--config-name=foo", "there is no foo.yaml in"]),
    # Sweeps.
    ("clip.threshold=0.1,0.25", ["clip.threshold=0.1,0.25", "add -m"]),
    ("clip=glob(*)", ["clip=glob(*)", "add -m"]),
    ("sweep.zip=[clip.threshold,seed]", ["sweep.zip=[clip.threshold,seed]", "add -m"]),
    ("sweep.name=mine clip.threshold=0.1", ["sweep.name=mine", "goes with a sweep", "add -m"]),
    ("sweep.objective=eval/accuracy", ["sweep.objective=eval/accuracy", "add -m"]),
    ("sweep={max_failures:1}", ["sweep={max_failures:1}", "add -m"]),
    ("hydra.sweep.dir=/tmp/x", ["hydra.sweep.dir=/tmp/x", "add -m"]),
    ("hydra/launcher=basic", ["hydra/launcher=basic", "add -m"]),
    (
        "hydra/sweeper=optuna hydra.sweeper.n_trials=8",
        ["(2 problems)", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=8", "add -m"],
    ),
    ("-m clip=norm,valeu", ["clip=valeu", "value?"]),
    ("-m clip.threshold=0.1,-1", ["clip.threshold=-1", "in the job clip.threshold=-1"]),
    (
        "-m plugin=tensor,ddp plugin.tp_size=2",
        ["(1 problem)", "plugin.tp_size=2", "in the job plugin=ddp"],
    ),
    ("-m recipe=glob(zz*)", ["recipe=glob(zz*)", "accumulate_4"]),
    ("-m seed=range(3,3)", ["seed=range(3,3)", "at least one value"]),
    ("-m clip.threshold=interval(0,1)", ["clip.threshold=interval(0,1)", "range(start,stop,step)"]),
    ("-m hydra.job.num=1,2", ["hydra.job.num=1,2", "cannot be swept"]),
    ("-m hydra/sweeper=optuna hydra.sweeper.n_trials=0 seed=1,2", ["n_trials=0", "at least 1"]),
    ("-m hydra/sweeper=optuna hydra.sweeper.n_trials=-1 seed=1,2", ["n_trials=-1", "at least 1"]),
    ("-m hydra/sweeper=optuna hydra.sweeper.n_trials=ten seed=1,2", ["n_trials=ten", "Integer"]),
    ("-m hydra/sweeper=optuna hydra.sweeper.n_jobs=0 seed=1,2", ["n_jobs=0", "at least 1"]),
    ("-m hydra.sweeper.max_batch_size=0 seed=1,2", ["max_batch_size=0", "at least 1, or null"]),
    # Folders.
    ("hydra.run.dir=/dev/null/run", ["hydra.run.dir=/dev/null/run", "/dev/null is not a folder"]),
    ("-m seed=1,2 hydra.sweep.dir=/dev/null/x", ["hydra.sweep.dir=/dev/null/x", "not a folder"]),
    ("hydra.run.dir=/proc/self/run", ["hydra.run.dir=/proc/self/run", "can be written"]),
    # Several at once.
    (
        "clip=nrom clip.treshold=1 accumulation.steps=0 sed=1 device=gpu --fro",
        ["(6 problems)", "clip=nrom", "clip.treshold=1", "accumulation.steps=0", "sed=1", "--fro"],
    ),
]


def refused(words, folder):
    done = python("-c", PROGRAM, *words, code=2, cwd=folder)
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("clip-runner: this request cannot be run (")
    assert done.stdout == ""
    assert list(folder.iterdir()) == []
    return done.stderr


@pytest.mark.parametrize(("words", "parts"), WRONG, ids=[words for words, _ in WRONG])
@pytest.mark.product(every=3)
def test_a_wrong_request_is_refused_in_one_message(words, parts, tmp_path):
    message = refused(words.split(), tmp_path)
    for part in parts:
        assert part in message


def test_each_problem_has_a_line_of_its_own(tmp_path):
    message = refused(["clip.treshold=1", "accumulation.steps=0"], tmp_path)
    head, *lines = message.splitlines()
    assert head == "clip-runner: this request cannot be run (2 problems)"
    assert len(lines) == 2
    assert lines[0].startswith("  clip.treshold=1       unknown key; did you mean clip.threshold?")
    assert lines[1] == "  accumulation.steps=0  must be an integer of at least 1"


def test_a_plus_is_never_the_advice_for_a_key_of_ours(tmp_path):
    assert "+" not in refused(["clip.treshold=1", "sed=1"], tmp_path)


def test_outputs_that_cannot_be_written_are_found_first(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_OUTPUTS", "/dev/null/outputs")
    message = refused(["clip=norm"], tmp_path)
    assert "RUNNER_OUTPUTS=/dev/null/outputs" in message
    assert "must be a folder that can be written" in message


def test_there_are_enough_of_them():
    assert len({words for words, _ in WRONG}) == len(WRONG) >= 45
