"""Overrides become jobs: what is composed is what Hydra composes, each job typed and checked."""

import pytest

from runner.config.problem import RequestError
from runner.request.request import request

pytestmark = pytest.mark.usefixtures("outputs")


def one(*words, **options):
    [job] = request(words, **options).jobs
    return job


def test_a_job_is_typed_and_plain_and_its_references_are_resolved(tmp_path):
    job = one("clip=adaptive", "clip.threshold=0.02", "seed=7", "model.width=${seed}")
    assert job.config.clip.mode == job.plain["clip"]["mode"] == "adaptive"
    assert job.plain["model"]["width"] == 7
    assert type(job.plain["optimizer"]) is dict
    assert "hydra" not in job.plain
    assert one("tracker.group=${hydra:job.name}").config.tracker.group == "runner"
    assert one("+optimizer.maximize=true").config.optimizer.arguments["maximize"] is True
    assert "nesterov" not in one("~optimizer.nesterov").config.optimizer.arguments
    assert list(tmp_path.iterdir()) == []


def test_a_target_replaces_the_arguments_of_its_option():
    words = ["model._target_=mine.Net", "model.width=64", "data._target_=mine.points"]
    for more in ([], ["~model.num_classes", "+data.samples=20"], ["data.samples=20"]):
        job = one(*words, *more).config
        assert job.model.mapping() == {"_target_": "mine.Net", "width": 64}
        assert job.data.arguments == ({"samples": 20} if more else {})
        assert job.data.batch_size == 32
    short = ["model=mine.Net", "optimizer=torch.optim.NAdam", "model.width=64"]
    assert one(*short).config.model.mapping() == {"_target_": "mine.Net", "width": 64}
    assert one(*short).config.optimizer.arguments == {}
    listed = ["optimizer=torch.optim.NAdam,torch.optim.RAdam", "optimizer.lr=0.1"]
    jobs = request(listed, multirun=True).jobs
    assert [one.config.optimizer.arguments for one in jobs] == [{"lr": 0.1}] * 2
    kept = one("optimizer._target_=torch.optim.SGD", "optimizer.lr=2").config.optimizer
    assert (kept.arguments["lr"], kept.arguments["momentum"]) == (2, 0.9)


def test_values_of_the_environment_and_secrets_are_not_recorded(monkeypatch):
    monkeypatch.setenv("RATE", "0.25")
    monkeypatch.setenv("HF_TOKEN", "abcdef")
    words = ["optimizer.lr='${oc.decode:${oc.env:RATE}}'", "+model.login='${oc.env:HF_TOKEN}'"]
    words += ["+model.copied='it is ${model.login}'", "+model.api_key=abc", "+model.width2=${seed}"]
    words += ["callbacks=[{_target_:m.N,api_key:sk-12}]", "+model.quoted='${callbacks.0.api_key}'"]
    job = one(*words)
    assert job.config.optimizer.arguments["lr"] == 0.25
    assert job.config.model.arguments["copied"] == "it is abcdef"
    assert job.plain["optimizer"]["lr"] == "${oc.decode:${oc.env:RATE}}"
    recorded = {"login": "${oc.env:HF_TOKEN}", "copied": "it is ${model.login}"}
    recorded["quoted"] = "${callbacks.0.api_key}"
    assert job.plain["model"].items() >= (recorded | {"api_key": "***", "width2": 0}).items()
    monkeypatch.delenv("RATE")
    with pytest.raises(RequestError, match=r"optimizer\.lr=.*cannot be resolved"):
        one(*words)


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (
            "clip=none,norm seed=range(0,2) device=cpu",
            ["clip=none seed=0", "clip=none seed=1", "clip=norm seed=0", "clip=norm seed=1"],
        ),
        ("clip=glob(n*)", ["clip=none", "clip=norm"]),
        ("hydra.mode=MULTIRUN seed=1,2", ["seed=1", "seed=2"]),
        ("clip=none,norm seed=${hydra:job.num}", ["clip=none", "clip=norm"]),
        ("model=gpt,lstm model.layers=2 seed=1", ["model=gpt", "model=lstm"]),
        ("seed=range(0,3) clip.threshold=1 sweep.max_jobs=3", ["seed=0", "seed=1", "seed=2"]),
        # Lists that are zipped advance together; unset leaves a key out.
        (
            "clip.threshold=1,2 seed=1,2 log.flush=3,4 sweep.zip=[clip.threshold,log.flush]",
            [
                "clip.threshold=1 log.flush=3 seed=1",
                "clip.threshold=1 log.flush=3 seed=2",
                "clip.threshold=2 log.flush=4 seed=1",
                "clip.threshold=2 log.flush=4 seed=2",
            ],
        ),
        (
            "clip=norm,schedule clip.warmup_steps=unset,30 sweep.zip=[clip,clip.warmup_steps]",
            ["clip=norm", "clip=schedule clip.warmup_steps=30"],
        ),
        (
            "model=m.A,m.B model.width=1,2 +model.bias=3,4 "
            "sweep.zip=[model,model.width,model.bias]",
            [
                "model._target_=m.A model.width=1 +model.bias=3",
                "model._target_=m.B model.width=2 +model.bias=4",
            ],
        ),
        (
            "clip.skip=ema,sigma +seed=1,2 sweep.zip=[clip.skip,+seed]",
            ["clip.skip.rule=ema +seed=1", "clip.skip.rule=sigma +seed=2"],
        ),
    ],
)
def test_a_sweep_is_every_combination_in_hydras_order(words, labels):
    found = request(words.split(), multirun="MULTIRUN" not in words)
    assert [job.label for job in found.jobs] == labels
    assert len({job.hash for job in found.jobs}) == len(labels)
    if "job.num" in words:
        assert [job.config.seed for job in found.jobs] == [0, 1]
    if "layers" in words:
        assert [job.config.model.arguments["layers"] for job in found.jobs] == [2, 2]
        assert found.jobs[0].overrides == ("model=gpt", "model.layers=2", "seed=1")


def test_a_key_that_is_removed_and_added_or_typed_alike_is_given_once():
    words = ["~optimizer.nesterov", "+optimizer.nesterov=true", "seed=3", "seed=3"]
    job = one(*words, "optimizer=sgd", "optimizer={lr:0.3}", "model=cnn", "model.width=8")
    assert (job.config.seed, job.config.optimizer.arguments["lr"]) == (3, 0.3)
    assert job.config.optimizer.arguments["nesterov"] is True


def test_one_number_is_a_list_of_one_threshold():
    [job] = request(["clip.what_if=0.5"]).jobs
    assert job.config.clip.what_if == [0.5]


def test_a_callback_is_named_by_its_class_alone():
    [job] = request(["callbacks=[mine.Printer,mine.Other]"]).jobs
    assert [target.target for target in job.config.callbacks] == ["mine.Printer", "mine.Other"]
