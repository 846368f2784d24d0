"""Overrides become jobs: what is composed is what Hydra composes, each job typed and checked."""

import pytest

from runner.config.problem import RequestError
from runner.request.request import request

pytestmark = pytest.mark.usefixtures("outputs")


def job_of(*words, **options):
    [job] = request(words, **options).jobs
    return job


def test_a_job_has_its_configuration_typed_beside_the_plain_one():
    job = job_of("clip=adaptive", "clip.threshold=0.02", "seed=7")
    assert job.config.clip.mode == job.plain["clip"]["mode"] == "adaptive"
    assert type(job.plain["optimizer"]) is dict
    assert "hydra" not in job.plain


def test_references_are_resolved():
    assert job_of("seed=7", "model.width=${seed}").plain["model"]["width"] == 7
    assert job_of("tracker.group=${hydra:job.name}").config.tracker.group == "runner"


def test_a_plus_adds_an_argument():
    assert job_of("+optimizer.maximize=true").config.optimizer.arguments["maximize"] is True


def test_a_tilde_removes_an_argument():
    assert "nesterov" not in job_of("~optimizer.nesterov").config.optimizer.arguments


def test_a_request_creates_nothing(tmp_path):
    job_of("clip=adaptive", "seed=7")
    assert list(tmp_path.iterdir()) == []


def test_a_target_replaces_the_arguments_of_its_option():
    words = ["model._target_=mine.Net", "model.width=64", "data._target_=mine.points"]
    for more in ([], ["~model.num_classes", "+data.samples=20"], ["data.samples=20"]):
        job = job_of(*words, *more).config
        assert job.model.mapping() == {"_target_": "mine.Net", "width": 64}
        assert job.data.arguments == ({"samples": 20} if more else {})
        assert job.data.batch_size == 32
    short = ["model=mine.Net", "optimizer=torch.optim.NAdam", "model.width=64"]
    assert job_of(*short).config.model.mapping() == {"_target_": "mine.Net", "width": 64}
    assert job_of(*short).config.optimizer.arguments == {}
    listed = ["optimizer=torch.optim.NAdam,torch.optim.RAdam", "optimizer.lr=0.1"]
    jobs = request(listed, multirun=True).jobs
    assert [job.config.optimizer.arguments for job in jobs] == [{"lr": 0.1}] * 2
    kept = job_of("optimizer._target_=torch.optim.SGD", "optimizer.lr=2").config.optimizer
    assert (kept.arguments["lr"], kept.arguments["momentum"]) == (2, 0.9)


RATE = "optimizer.lr='${oc.decode:${oc.env:RATE}}'"


def test_values_of_the_environment_are_recorded_as_references(monkeypatch):
    monkeypatch.setenv("RATE", "0.25")
    monkeypatch.setenv("HF_TOKEN", "abcdef")
    words = [RATE, "+model.login='${oc.env:HF_TOKEN}'", "+model.copied='it is ${model.login}'"]
    job = job_of(*words, "+model.width2=${seed}")
    assert job.config.optimizer.arguments["lr"] == 0.25
    assert job.config.model.arguments["copied"] == "it is abcdef"
    assert job.plain["optimizer"]["lr"] == "${oc.decode:${oc.env:RATE}}"
    recorded = {"login": "${oc.env:HF_TOKEN}", "copied": "it is ${model.login}", "width2": 0}
    assert job.plain["model"].items() >= recorded.items()


def test_secrets_are_not_recorded():
    words = ["+model.api_key=abc", "+model.quoted='${callbacks.0.api_key}'"]
    job = job_of(*words, "callbacks=[{_target_:m.N,api_key:sk-12}]")
    recorded = {"api_key": "***", "quoted": "${callbacks.0.api_key}"}
    assert job.plain["model"].items() >= recorded.items()


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("RATE", raising=False)
    with pytest.raises(RequestError, match=r"optimizer\.lr=.*cannot be resolved"):
        job_of(RATE)


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
    requested = request(words.split(), multirun="MULTIRUN" not in words)
    assert [job.label for job in requested.jobs] == labels
    assert len({job.hash for job in requested.jobs}) == len(labels)
    if "job.num" in words:
        assert [job.config.seed for job in requested.jobs] == [0, 1]
    if "layers" in words:
        assert [job.config.model.arguments["layers"] for job in requested.jobs] == [2, 2]
        assert requested.jobs[0].overrides == ("model=gpt", "model.layers=2", "seed=1")


def test_a_key_of_a_section_stays_beside_the_target_of_a_user():
    job = job_of("data._target_=mine.points", "data.leave_out.samples=[7]")
    assert job.config.data.leave_out.samples == [7]
    assert job.plain["data"]["leave_out"] == {"steps": [], "samples": [7]}


def test_a_key_that_the_record_of_an_earlier_version_lacks_is_set_without_a_plus():
    job = job_of("~data.leave_out", "data.leave_out.steps=[7]")
    assert job.config.data.leave_out.steps == [7]


def test_a_key_that_is_removed_may_be_added_again():
    job = job_of("~optimizer.nesterov", "+optimizer.nesterov=true")
    assert job.config.optimizer.arguments["nesterov"] is True


def test_an_override_that_is_typed_twice_alike_is_given_once():
    assert job_of("seed=3", "seed=3").config.seed == 3


def test_an_option_goes_with_values_of_its_group():
    job = job_of("optimizer=sgd", "optimizer={lr:0.3}", "model=cnn", "model.width=8")
    assert job.config.optimizer.arguments["lr"] == 0.3
    assert job.config.model.arguments["width"] == 8


def test_one_number_is_a_list_of_one_threshold():
    [job] = request(["clip.what_if=0.5"]).jobs
    assert job.config.clip.what_if == [0.5]


def test_a_callback_is_named_by_its_class_alone():
    [job] = request(["callbacks=[mine.Printer,mine.Other]"]).jobs
    assert [target.target for target in job.config.callbacks] == ["mine.Printer", "mine.Other"]
