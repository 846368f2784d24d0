"""Whatever is typed: a request that can be run, or one message that says why it cannot."""

import os
import pickle
from itertools import chain

import pytest
from hydra._internal.config_repository import ConfigRepository
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runner.cli import arguments
from runner.config.check import owned_keys
from runner.config.folders import find
from runner.config.identity import config_hash
from runner.config.problem import RequestError

GROUPS = sorted(folder.name for folder in find("conf").iterdir() if folder.is_dir())
NAMES = sorted(file.stem for home in ("conf", "recipes") for file in find(home).rglob("*.yaml"))
HYDRA = [
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.name", "hydra.job.num"),
    *("hydra.sweeper.params", "hydra.sweeper.n_trials", "hydra/sweeper", "hydra/launcher", "hydra"),
    *("hydra.mode", "hydra.searchpath", "hydra.output_subdir", "hydra.job.chdir", "hydra/recipe"),
    *("model.width", "optimizer.lr", "optimizer.betas", "data.shape", "scheduler.eta_min"),
]
ENDS = ["[0]", ".0", ".", "..a", "@x", "@_global_", "/x", "." + "a." * 50, "[", "]", "[a]", ":"]

# Any character: controls, NUL, right-to-left marks, beyond the basic plane, lone surrogates.
TEXT = st.text(st.characters(), max_size=12) | st.text(
    st.characters(codec="ascii", min_codepoint=32), max_size=12
)
LONG = [f"{part * 300}{end}" for part, end in (("x", ""), ("a.", ""), ("[", ""), ("${", "}" * 300))]
LONG += ["猫" * 100, "9" * 400, "9" * 5000]
ODD = [
    *("1e999", "1e-320", "nan", "inf", "1_000", "0x1f", "010", "+1", "--1", "0.1.2", "true"),
    *("false", "null", "auto", "???", "3ep", "0ep", "torch.optim.SGD", "runner.clip.ClipMode"),
    *("nowhere.Mode", "a.b.c", ".", "%", "/dev/null/x", "file:///nowhere", "MULTIRUN", "''", '""'),
    *("'\\'", "'\\\\'", '"a\'b"', "'${seed}'", "'a,b'", "' '", "\\", "${", "}", "${seed"),
    *("${${seed}}", "\\${seed}", "${nowhere}", "${runner.id:}", "${runner.first:}"),
    *("${runner.first:null,${seed}}", "${runner.outputs:}", "${runner.x:}", "${hydra:job.num}"),
    *("${hydra:nowhere}", "${hydra.help.template}", "${oc.env:HOME}", "${oc.env:NOWHERE}"),
    *("${oc.decode:'[1'}", "${now:%Y}", "${oc.select:nowhere,3}", "${oc.create:{a:1}}"),
    *("${oc.dict.keys:clip}", "${clip}", "${.}", "${.threshold}", "${seed.x}", "a${seed}b"),
    *("${sweep.name}", "${tracker.project}${seed}", "glob(*)", "glob([*],exclude=[a*])"),
    *("range(0,1e9)", "range(0,1,1e-30)", "range(0,1,0)", "shuffle(range(0,1e9))"),
    *("interval(0,1)", "choice(interval(0,1),2)", "tag(a,choice(1,2))"),
    *("tag(log,interval(0.1,1))", "sort(b,a,3)"),
]
"""Values that Hydra, OmegaConf or YAML read in a way of their own."""
KNOWN = st.sampled_from(sorted(owned_keys()))
GROUP = st.sampled_from(GROUPS)
KEY = st.one_of(
    *(KNOWN, KNOWN, GROUP, st.sampled_from(HYDRA), TEXT, st.sampled_from(LONG)),
    st.builds(lambda key, at: key[:at] + key[at + 1 :], KNOWN, st.integers(0, 9)),
    st.builds("{}{}{}".format, GROUP, st.sampled_from(".@"), TEXT),
    st.builds("{}{}".format, KNOWN, st.sampled_from(ENDS)),
)
PLAIN = st.one_of(
    *(st.sampled_from(ODD), st.sampled_from(NAMES), st.sampled_from(LONG), TEXT),
    *(st.integers(-(10**30), 10**30).map(str), st.integers(-3, 9).map(str), st.floats().map(str)),
    st.builds("{}{}{}".format, st.sampled_from("'\""), TEXT, st.just("'")),
    KNOWN.map("${{{}}}".format),
)
FUNCTIONS = ["choice", "range", "interval", "glob", "sort", "shuffle", "tag", "int", "nowhere", ""]


def _inside(parts):
    items = st.lists(parts, max_size=3).map(",".join)
    pairs = st.lists(st.builds("{}:{}".format, PLAIN, parts), max_size=3).map(",".join)
    return st.one_of(
        *(items, items.map("[{}]".format), items.map("[{}".format)),
        *(pairs.map("{{{}}}".format), items.map("range({},step=0.5)".format)),
        st.builds("{}({})".format, st.sampled_from(FUNCTIONS), items),
    )


# Mappings whose keys are of any type, as labels of classes are: {0:cat,1:dog}.
NAMED = st.one_of(
    *(st.integers(-3, 10**12).map(str), st.floats().map(str), TEXT, st.sampled_from(ODD)),
    st.sampled_from(["true", "false", "null", "nan", "inf", "''", "'a b'", "api_key", "_target_"]),
    st.from_regex(r"[a-z_]{1,6}", fullmatch=True),
)
LEAF = st.one_of(
    *(
        st.integers(-9, 9).map(str),
        st.floats().map(str),
        st.from_regex(r"[a-z]{1,6}", fullmatch=True),
    ),
    st.sampled_from(
        ["true", "null", "'a b'", "[1,a]", "'${oc.env:HOME}'", "'${seed}'", "torch.nn.GELU"]
    ),
)


def _mapping(parts):
    pairs = st.lists(st.builds("{}:{}".format, NAMED, parts), min_size=1, max_size=4)
    mapping = pairs.map(",".join).map("{{{}}}".format)
    return st.one_of(
        mapping, mapping, st.lists(mapping, max_size=2).map(",".join).map("[{}]".format)
    )


MAPPING = st.recursive(LEAF, _mapping, max_leaves=6).filter(lambda text: "{" in text)
SECTION = st.sampled_from(
    [
        *(
            "+model.labels",
            "+data.labels",
            "+optimizer.labels",
            "+scheduler.labels",
            "++loss.labels",
        ),
        *("callbacks", "eval.metrics", "clip.groups", "clip.units", "model", "+model", "tracker"),
        *("data.train", "~hydra", "hydra", "~model", "hydra.job.env_set", "+hydra.job.env_set"),
        *(
            "plugin.tp_plan",
            "hydra.sweeper.params",
            "sweep",
            "tracker.tags",
            "seed",
            "+x",
            "resume",
        ),
    ]
)
VALUE = st.one_of(PLAIN, st.recursive(PLAIN, _inside, max_leaves=6))
SIGNS = st.sampled_from(["", "", "", "", "+", "++", "~"])
FLAGS = ["-m", "--multirun", "--cfg", "-c", "--info", "-x", "--", "-", "=", "", " "]
OVERRIDE = st.one_of(
    st.builds("{}{}={}".format, SIGNS, KEY, VALUE),
    st.builds("{}={}".format, GROUP, st.sampled_from(NAMES)),
    st.builds("{}={}".format, SECTION, MAPPING),
    *(KEY.map("~{}".format), KEY, st.sampled_from(FLAGS), TEXT),
)

# Most of what is typed is right: then what one odd override does is not hidden by others.
RIGHT = [
    *("seed=3", "clip=adaptive", "clip=none", "clip=value clip.threshold=0.1", "plugin=ddp"),
    *("plugin=ddp plugin.nproc=2", "plugin=tensor plugin.tp_size=2", "data=synthetic", "model=gpt"),
    *("optimizer=adam optimizer.lr=0.001", "recipe=sweep_norm", "recipe=gpt", "tracker=none"),
    *("accumulation=x4", "train.max_duration=2ba", "sweep.name=mine", "-m seed=1,2", "-m"),
    *("-m clip.threshold=1,2 seed=1,2", "-m hydra/sweeper=optuna", "scheduler=cosine"),
]
REQUEST = st.one_of(
    st.lists(OVERRIDE, min_size=1, max_size=4),
    st.builds(
        lambda right, odd: [*chain.from_iterable(words.split() for words in right), odd],
        st.lists(st.sampled_from(RIGHT), max_size=3),
        OVERRIDE,
    ),
)


EXAMPLES = os.environ.get("RUNNER_TESTS_EXAMPLES")


@pytest.fixture
def read_once(monkeypatch):
    """Let Hydra read each file of options once: half of the time of a request is YAML."""
    contents = {}
    load_config = ConfigRepository.load_config

    def load_once(repository, config_path):
        sources = tuple((source.scheme(), source.path) for source in repository.sources)
        key = (config_path, sources)
        if key not in contents:
            contents[key] = pickle.dumps(load_config(repository, config_path))
        return pickle.loads(contents[key])

    monkeypatch.setattr(ConfigRepository, "load_config", load_once)


@pytest.mark.usefixtures("outputs", "read_once")
@pytest.mark.timeout(0)
@settings(
    max_examples=int(EXAMPLES or 24),
    deadline=None,  # the clock of a busy machine tells nothing
    database=None,
    derandomize=EXAMPLES is None,  # the gate runs the same examples every day
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@example(words=["hydra.mode='${seed}'"])
@example(words=["clip._target_=${clip}"])
@example(words=["hydra.job.chdir='${nowhere}'"])
@example(words=["-m", "seed=1,2", "hydra.sweeper.params='${oc.env:HOME}'"])
@example(words=["-cd=" + "x" * 300])
@example(words=["resume=" + "x" * 300])
@given(words=REQUEST)
def test_a_request_runs_or_is_refused_in_one_message(tmp_path, words):
    if {"-m", "--multirun"} & {*words} and not any("sweep" in word for word in words):
        words = [*words, "sweep.max_jobs=6"]  # so that an example does not take minutes
    before = list(tmp_path.rglob("*"))
    try:  # what the command does before it imports torch
        jobs = arguments.checked(arguments.read(words)).jobs
        assert jobs
        assert all(len(config_hash(job.plain)) == 16 for job in jobs)
    except RequestError as error:
        messages = [problem.message for problem in error.problems]
        assert len(str(error).splitlines()) == 1 + len([*filter(None, messages)])  # noqa: PT017
    assert list(tmp_path.rglob("*")) == before
