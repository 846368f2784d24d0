"""Requests that cannot be run: exit code 2, one message, nothing created."""

import time
from collections import Counter

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from runner.cli.main import main
from runner.config.modes import NAMES
from runner.launch import agreement

KEYS = [
    (
        "clip.treshold=1 threshold=0.1 max_grad_norm=1 clip.eps=1 tensor_parallel_size=2",
        [
            *("(5 problems)", "clip.treshold=1", "did you mean clip.threshold?", "norm_type"),
            *("threshold=0.1", "max_grad_norm=1", "clip.threshold?", "plugin.tp_size?"),
            *("clip.eps=1", "is an option of clip=adaptive"),
        ],
    ),
    ("clip.threshold.low=1 model.widht=8", ["clip.threshold={low:1}", "model.width?", "_target_"]),
    ("clip={treshold:1} hydra.rnu.dir=x", ["clip.treshold=1", "Key 'rnu' not in"]),
    ("clip=adaptive ~clip.eps ~clip.epz", ["clip.epz", "unknown key", "clip.eps?"]),
    (
        "model=mine.Net model=cnn seed=1 seed=2 +model.api_key=a +model.api_key=b recipe=none "
        "optimizer={lr:1} optimizer.lr=2 ~clip.eps clip.eps=1 clip.skip=ema clip.skip.rule=sigma "
        "recipe=accumulate_4",
        [
            *("is given twice (model=mine.Net and model=cnn)", "(seed=1 and seed=2)"),
            *("(recipe=none and recipe=accumulate_4)", "(clip.skip=ema and clip.skip.rule=sigma)"),
            *("(optimizer={lr:1} and optimizer.lr=2)", "(~clip.eps and clip.eps=1)"),
            "(+model.api_key=*** and +model.api_key=***)",
        ],
    ),
    ("-m seed=1,2 seed=3,4", ["(seed=1,2 and seed=3,4)"]),
]
# Words of other tools, and shapes of a mistake.
OTHER_WORDS = [
    (
        "max_norm=1 max_grad_norm=1 gradient_clip_val=1 grad_clip=1 clip_value=1 clip.max_norm=1",
        ["(6 problems)", *("did you mean clip.threshold?",) * 6],
    ),
    (
        "epochs=3 max_epochs=3 num_train_epochs=3 max_steps=3 trainer.max_epochs=3",
        ["(5 problems)", *("did you mean train.max_duration?",) * 5],
    ),
    (
        "batch_size=8 per_device_train_batch_size=8 gradient_accumulation_steps=4 "
        "accumulate_grad_batches=4",
        [*("mean data.batch_size?",) * 2, *("mean accumulation.steps?",) * 2],
    ),
    (
        "lr=1 learning_rate=1 model.lr=1 devices=2 gpus=2 strategy=ddp pretrained=true weights=x",
        [
            *("mean optimizer.lr?",) * 3,
            *("mean plugin.nproc?",) * 2,
            *("mean plugin?", "mean model.weights?", "mean model.weights?"),
        ],
    ),
    (
        "warmup_steps=10 warmup_ratio=0.1 scheduler.warmup_steps=10 calibrate.warmup=3",
        [
            *("mean scheduler.warmup_steps, with scheduler=linear_warmup_cosine?",) * 2,
            "mean scheduler.warmup_fraction, with scheduler=linear_warmup_cosine?",
            "mean calibrate.warmup_steps?",
        ],
    ),
    ("scheduler=wsd warmup_ratio=0.1", ["did you mean scheduler.warmup_fraction?"]),
    ("wandb=false report_to=wandb", ["did you mean tracker=none?", "did you mean tracker?"]),
    (
        "precision=bf16-mixed tracker=mlflow",
        ["mean bf16?", "a sink of your own: tracker._target_=package.Sink"],
    ),
    ("precision=16-mixed", ["did you mean fp16?"]),
    ("--help clip.treshold", ["did you mean clip.threshold?"]),
    ("report runs --cvs", ["--cvs  unknown; did you mean --csv?"]),
    ("clip.threshold 0.5", ["clip.threshold=VALUE", "is one word"]),
    ("--clip.threshold=0.5", ["a key has no dashes: clip.threshold=0.5"]),
    (
        "train help clip=norm, mydata.csv",
        [
            "no command of its own",
            "mean --help",
            "ends with a comma",
            "data.path=mydata.csv",
        ],
    ),
    ("activation_checkpointing=blocks", ["DigitsCNN has no blocks: a block is an element of"]),
    ("activation_checkpointing=0", ["none, blocks", "at least 1"]),
    (
        "compile=blocks compile.backend=nope",
        ["compile=blocks ", "DigitsCNN has no blocks", "use one of", "inductor"],
    ),
    ("compile=model compile.mode=nope", ["compile.mode=nope", "nope"]),
    (
        "compile=model plugin=pipeline plugin.nproc=2",
        ["compile=model", "never the whole: use compile=blocks"],
    ),
    ("clip.threshold=inf", ["clip=none measures without clipping"]),
    ("model=torch.py", ["name a class or a function of the file: torch.NAME"]),
]
OPTIONS = [
    (
        "clip=nrom plugin=dpp plugin.nproc=2 accumulation=x3 precision=half optimizer=adma",
        [
            *("(5 problems)", "clip=nrom", "norm?", ", ".join(NAMES), "plugin=dpp", "ddp?"),
            *("ddp, fsdp, hybrid, moe, pipeline, single, tensor, zero", "accumulation=x3"),
            *("none, x2, x4, x8", "precision=half", "fp16?", "bf16, fp16, fp32", "optimizer=adma"),
            "adafactor, adagrad, adam, adamw, lion, muon, rmsprop, sgd",
        ],
    ),
    (
        "~clip recipe=cifar10_resnet43",
        ["clip.mode=", "no value given", "cifar10_resnet34?", "accumulate_4"],
    ),
    (f"clip._target_={'n' * 300}.N", ["clip._target_=nnn", "No module named"]),
]
VALUES = [
    (
        "clip.norm_type=3 clip.nonfinite=raise accumulation.steps=1.5 data.batch_size=0 "
        "data.num_workers=-1 data.drop_last=1 train.max_duration=3weeks eval.interval=-1ep "
        "seed=-1 device=gpu log.interval=0 telemetry.per_layer=on launch.timeout=0 "
        "tracker.mode=on tracker.tags=a sweep.name=a/b verify.dtype=fp64 model._target_=resnet",
        [
            *("(18 problems)", "1, 2 or inf", "skip, error, ignore"),
            *("accumulation.steps=1.5", "an integer", "data.num_workers=-1", "at least 0"),
            *("a boolean", "tok (tokens)", "eval.interval=-1ep"),
            *("did you mean cuda?", "auto, online, offline, disabled", "a list"),
            *("begin with a letter or a digit", "float64?", "model._target_=resnet", "full name"),
        ],
    ),
    (
        "clip=adaptive clip.exclude=head train=5 model.width=???",
        [
            *("clip.exclude=head", "auto", "a list", "train=5", "max_duration"),
            *("model.width=???", "no value given"),
        ],
    ),
    (
        f"tracker.tags=[a,{'b' * 65}] tracker.project=a/b",
        ["(2 problems)", "tracker.tags=", "65", "tracker.project=a/b", "wandb allows at most 128"],
    ),
    (f"tracker.project={'p' * 129}", ["(1 problem)", "wandb allows at most 128 characters"]),
    ("eval.metrics=[{a:1}]", ["eval.metrics=[{a:1}]", "a mapping needs a _target_"]),
    ("clip._target_=5", ["(1 problem)", "clip._target_=5", "must be the full name of a class"]),
    ("model.width=${nowhere}", ["model.width=${nowhere}", "'nowhere' not found"]),
    ("seed=${.}", ["seed=${.}", "cannot be read as KEY=VALUE"]),
    ("tracker.project=${tracker.group} tracker.group=${tracker.project}", ["tracker.project="]),
    # Values of odd size or with odd characters.
    (
        f"seed={'9' * 5000} optimizer.lr={'9' * 400} tracker.project=a\0b clip=adaptive "
        f"clip.exclude={'[' * 3000}{']' * 3000}",
        [
            *("seed=", "cannot be read", "(5,005 characters)", "finite number"),
            *("tracker.project=a\\x00b", "clip.exclude=[["),
        ],
    ),
    ("clip=adaptive clip.exclude=[a,[choice(1,2)]]", ["clip.exclude=", "choice(1,2)"]),
]
COMBINATIONS = [
    ("clip=none clip.threshold=1", ["clip.threshold=1", "takes none"]),
    ("plugin=single plugin.nnodes=2", ["plugin.nnodes=2", "torchrun"]),
    ("plugin=pipeline plugin.pp_size=4 data.batch_size=2", ["data.batch_size=2", "4 or more"]),
    *(
        (f"{plugin} plugin.sequence_parallel=true model=gpt data=text", ["sequence_parallel=true"])
        for plugin in ("plugin=tensor plugin.nproc=1", "plugin=hybrid plugin.nproc=2")
    ),
    ("clip.threshold=null", ["clip.threshold=null", "must be a finite number"]),
    ("clip=value clip.step_in_backward=true clip.nonfinite=error", ["clip.step_in_backward="]),
    ("clip.when=backward clip=value precision=fp16", ["precision.name=", "an overflow leaves"]),
    *(
        (f"clip.when=backward {words}", ["(1 problem)", *parts])
        for words, parts in [
            ("clip=norm", ["clip.when=", "needs the whole gradient", "use step", "per_parameter"]),
            (
                "clip=chain clip.links=[{mode:value,threshold:1.0}]",
                ["clip.when=", "whole gradient"],
            ),
            ("clip=per_parameter clip.by=block", ["clip.when=", "use clip.by=tensor"]),
            ("clip=value plugin=fsdp plugin.nproc=2", ["clip.when=", "plugin=fsdp makes"]),
            ("clip=value clip.nonfinite=ignore", ["clip.nonfinite=", "use error or skip"]),
            ("clip=value clip.step_in_backward=true", ["clip.nonfinite=", "cannot be taken back"]),
            ("clip=value clip.skip=sigma", ["clip.skip", "known after the backward pass"]),
            ("clip=update optimizer=adamw", ["clip.step_in_backward=", "limits the step itself"]),
        ]
    ),
]
FLAGS = [
    ("norm =3 seed=(", ["norm", "KEY=VALUE", "  =3 ", "seed=(", "quotes"]),
    ("--fro seed=1", ["--fro", "unknown flag", "--help"]),
    ("--cfg everything", ["--cfg", "everything", "job"]),
    ("--cfg job -m", ["--multirun", "not allowed with argument --cfg"]),
    *((f"{flag} -m", ["not allowed with"]) for flag in ("-sc query=bash", "--hydra-help")),
    *((f"-sc {word}", ["invalid choice", "install=bash"]) for word in ("foo", "install=foo")),
    ("-sc", ["expected one argument"]),
    ("--cfg job -p nonexist", ["--package=nonexist", "no such key"]),
    ("-p clip", ["--package", "goes with --cfg"]),
    ("--resolve --info", ["--resolve", "goes with --cfg"]),
    ("--config-dir /nowhere", ["--config-dir", "folder that exists"]),
    *((f"clip=nrom {flag}", ["did you mean norm?"]) for flag in ("--help", "--cfg job", "--info")),
]
SWEEPS = [
    ("clip.threshold=0.1,0.25", ["clip.threshold=0.1,0.25", "add -m"]),
    ("-m seed=range(1,2,0) log.interval=0", ["seed=range(1,2,0)", "log.interval=0"]),
    ("-m clip=norm,valeu seed=1,-1", ["clip=valeu", "value?", "seed=-1"]),
    (
        "-m recipe=glob(zz*) clip.threshold=interval(0,1) seed=1,range(0,3) hydra.job.num=1,2 "
        "sweep.name=a,b hydra.sweep.subdir=../../x",
        [
            *("recipe=glob(zz*)", "at least one value", "=interval(0,1)", "range(start,stop,step)"),
            *("seed=1,range(0,3)", "hydra.job.num=1,2", "all runs of a sweep share it"),
            "hydra.sweep.subdir=../../x",
        ],
    ),
    ("-m clip.threshold=shuffle(range(0,1e9))", ["sweep.max_jobs=10000", "clip.threshold 10,001"]),
    ("-m seed=range(0,300) clip.threshold=range(1,400)", ["119,700 runs", "clip.threshold 399"]),
    ("-m seed=1,2 sweep.zip=5", ["sweep.zip=5", "a list"]),
    ("-m seed=1,2 sweep.zip=${nowhere}", ["sweep.zip="]),
    (
        "-m seed=1,2 sweep.zip=[seed,clip.threshold,nope]",
        ["sweep.zip=[", "clip.threshold, nope: no list of values in this sweep (its lists: seed)"],
    ),
    ("-m seed=1,2 clip.threshold=1,2,3 sweep.zip=[seed,clip.threshold]", ["clip.threshold has 3"]),
    (
        "-m recipe=accumulate_4,sweep_norm hydra/launcher=submitit_slurm hydra.launcher.nodes=2",
        ["recipe=accumulate_4,sweep_norm", "sweep_norm says for itself", "must be 1: a run of"],
    ),
    ("-m clip=schedule clip.warmup_steps=unset,30", ["must be an integer"]),
]
FOLDERS = [
    ("hydra.run.dir=/dev/null/run", ["hydra.run.dir=/dev/null/run", "/dev/null: Not a directory"]),
    ("-m seed=1,2 hydra.sweep.dir=/dev/null/x", ["hydra.sweep.dir=/dev/null/x", "Not a directory"]),
    ("hydra.run.dir=/proc/self/run", ["hydra.run.dir=/proc/self/run", "can be written"]),
    (f"hydra.run.dir={'n' * 300}", ["hydra.run.dir=", "File name too long"]),
    (f"-cd={'n' * 300}", ["--config-dir/-cd", "a folder that exists"]),
    (f"resume={'n' * 300}", ["resume=nnn", "there is no run at"]),
    (f"resume={'n' * 300}@5", ["resume=nnn", "holds no checkpoint", "no such folder"]),
]
COMMANDS = [
    ("raport runs", ["raport  is no command; did you mean report?"]),
    ("new my-model", ["such as my_model"]),
    ("new größe", ["must be a Python identifier in ASCII"]),
    ("new torch", ["is a module that Python finds"]),
    ("new gpt", ["is an option or a recipe already"]),
    ("plan -m seed=1,-1 clip.treshold=2", ["clip.threshold?", "seed=-1"]),
    ("plan --cfg job", ["--cfg", "unknown flag of a plan"]),
    ("plan -m model=cnn,gpt", ["does not take a sample of"]),  # what torch alone can tell
    ("calibrate -m seed=1,2", ["-m", "unknown flag of a calibration"]),
    (
        "calibrate accumulation.steps={0:1,9ba:2}",
        ["changes the batch, and a calibration is of one"],
    ),
    ("verify accumulation=auto", ["finds the microbatches of a run, and a verification is of"]),
    ("calibrate recipe=sweep_norm", ["a calibration is of one run"]),
    ("calibrate calibrate.steps=10 calibrate.warmup_steps=10", ["must leave some"]),
    ("verify verify.steps=0 clip.treshold=1", ["at least 1", "clip.threshold?"]),
    ("evaluate nowhere", ["RUN", "must be a folder that exists, not nowhere"]),
    ("export --forced", ["RUN", "must be given"]),
    ("evaluate", ["(1 problem)", "  RUN  must be given"]),
    ("dashboard --project", ["--project", "expected one argument"]),
]
LINEAR = "model=torch.nn.Linear"
FIRST_HOUR = [
    ("clip=0.25", ["did you mean clip.threshold=0.25?"]),
    ("norm=clip", ["did you mean clip=norm?"]),
    ("accumulation=4", ["did you mean accumulation.steps=4?"]),
    ("accumulation=auto device=cpu", ["steps=auto  nothing tells on a CPU that memory is short"]),
    ("accumulation.steps={1ba:2}", ["the first phase must begin at 0, not at 1ba"]),
    ("accumulation.steps={0:1,9ba:2,20sp:4}", ["phases must rise in one unit, and 20sp follows 9"]),
    (
        "accumulation.steps={0:1,9tok:2} scheduler=constant",
        ["steps=9tok  runner.data.digits.digits has no tokens"],
    ),
    ("scheduler=plateau scheduler.by=samples", ["follows evaluations, not samples"]),
    ("clip.threshold=abc", ["clip.threshold=abc", "number"]),
    ("precision=amp", ["did you mean fp16?"]),
    ("model=resnet50", ["did you mean resnet34?", "model=package.name"]),
    ("+model.id2label={null:cat}", ["a key of a mapping must be text, a number, true or false"]),
    ("data=fractions.Fraction", ["makes a Fraction, not a data set nor a runner.data.Data"]),
    ("data=own data.train=3", ["data.train is of class int, which is no data set"]),
    ("model=nomodule.Net", ["No module named 'nomodule': install nomodule, or run"]),
    ("model=torch.nn.Linaer", ["torch.nn has no Linaer; did you mean Linear?"]),
    (LINEAR, ["model.in_features", "model.out_features", "(2 problems)", "no value given"]),
    (
        f"{LINEAR} model.in_features=8 model.out_feature=10",
        ["model.out_feature=10", "did you mean model.out_features?"],
    ),
    (f"{LINEAR} model.in_features=3 model.out_features=2", ["does not take a sample of"]),
    (
        "loss=torch.nn.MSELoss",
        ["loss._target_=torch.nn.MSELoss", "outputs [B, 10] with targets [B]"],
    ),
    ("plugin=tensor plugin.tp_size=2 plugin.nproc=3", ["plugin.nproc=3", "tp_size 2"]),
    *((f"resume={name}", [f"resume={name}", "there is no run at"]) for name in ("last", "best")),
    ("resume=/nope", ["resume=/nope", "there is no", "auto, never, or the path of a run"]),
    ("data=csv", ["data.path", "data.target", "no value given"]),
    (
        "data=own data.train._target_=tests.own_code.Flow data.train.samples=2000 "
        f"{LINEAR} model.in_features=20 model.out_features=2",
        ["give train.max_duration in ba or sp", "a stream"],
    ),
]
MOVING_LIMITS = [
    *(
        (f"calibrate clip={mode}", [f"clip={mode}", "clip=norm"])
        for mode in ("percentile", "zscore")
    ),
    ("clip=zscore clip.what_if=[1]", ["clip.what_if=[1]"]),
    ("clip=percentile clip.threshold=101", ["clip.threshold=101"]),
    ("clip=percentile clip.window=3", ["clip.window=3"]),
    ("clip=percentile clip.history=both", ["clip.history=both", "raw", "clipped"]),
    ("clip=zscore clip.rule=maen", ["clip.rule=maen", "mean"]),
    ("clip=schedule clip.of=nrom", ["clip.of.mode=nrom", "norm"]),
    ("clip=schedule clip.of=none", ["clip.of.threshold"]),
    ("clip=schedule clip.of={mode:adaptive,epz:1}", ["clip.of.epz=1", "mean eps?"]),
    ("clip=schedule clip.of={mode:adaptive,eps:-1}", ["clip.of.eps=-1"]),
    ("clip=schedule clip.of={mode:value,threshold:1}", ["clip.of.threshold=1"]),
    ("clip=schedule clip.of={mode:adaptive,exclude:[haed.*]}", ["clip.of.exclude"]),
    ("clip=schedule clip.decay=cosine", ["clip.steps"]),
]
WRONG = [
    *(
        *KEYS,
        *OTHER_WORDS,
        *OPTIONS,
        *VALUES,
        *COMBINATIONS,
        *FLAGS,
        *SWEEPS,
        *FOLDERS,
        *COMMANDS,
        *FIRST_HOUR,
    ),
    *((words, ["(1 problem)", *parts]) for words, parts in MOVING_LIMITS),
    ("", ["hydra.run.dir=/dev/null/outputs", "must be a folder that can be written"]),
]


@pytest.mark.parametrize(("words", "parts"), WRONG, ids=[words[:60] for words, _ in WRONG])
def test_a_wrong_request_is_refused_in_one_message(
    words, parts, outputs, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if not words:
        monkeypatch.setenv("RUNNER_OUTPUTS", "/dev/null/outputs")
    assert main(words.split(" ") if words else []) == 2
    said = capsys.readouterr()
    for part, count in Counter(parts).items():
        assert said.err.count(part) >= count, part
    assert "Traceback" not in said.err
    assert said.out == ""
    if words == KEYS[0][0]:  # a plus is never the advice for a key of ours
        assert "+" not in said.err
    assert list(tmp_path.iterdir()) == []
    head, *lines = said.err.splitlines()
    if lines:
        assert head.startswith(f"clip-runner: this request cannot be run ({len(lines)} problem")
    assert all(len(line) < 5000 for line in lines)


def test_optuna_that_is_not_installed_is_named_with_what_installs_it(outputs, capsys, monkeypatch):
    Plugins.instance()  # which registers their options
    sweepers = ConfigStore.instance().repo["hydra"]["sweeper"]
    monkeypatch.delitem(sweepers, "optuna.yaml", raising=False)
    words = ["-m", "hydra/sweeper=optuna", "clip.threshold=interval(0.1,1)"]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert '(1 problem)\n  hydra/sweeper=optuna  is not installed: pip install "clip-' in printed
    assert not outputs.exists()


RANKS = [(0, 0, True), (1, 1, False), (2, 0, True), (1, None, False)]
"""Ranks of four, their local rank, and whether they are the first one of their machine."""


@pytest.fixture
def waited(rank, local_rank, outputs, monkeypatch):
    """The seconds that this rank of four waited, while it is one."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    seconds = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    monkeypatch.setattr(agreement, "_answers", lambda answer, *_: [answer] * 4)
    return seconds


@pytest.mark.usefixtures("waited")
@pytest.mark.parametrize(("rank", "local_rank", "is_first"), RANKS)
def test_the_first_rank_of_a_machine_alone_says_what_is_wrong(is_first, capsys):
    assert main(["sed=1"]) == 2
    assert capsys.readouterr().err.count("this request cannot be run") == is_first


@pytest.mark.parametrize(("rank", "local_rank", "is_first"), RANKS)
def test_torchrun_ends_no_rank_before_the_first_one_has_said_what_is_wrong(waited, is_first):
    """As soon as a rank fails, torchrun ends every rank."""
    assert main(["sed=1"]) == 2
    assert bool(waited) is not is_first
