import inspect
import re
import shlex

import pytest
import yaml
from omegaconf import OmegaConf

from runner.compose.request import request
from runner.config.folders import find, options
from runner.config.modes import NAMES, built_in, options_of
from runner.config.plugin_section import USES

FILES = sorted(find("conf").glob("*/*.yaml"))
OWNED = ["plugin", "clip", "accumulation", "precision", "tracker", "checkpoint"]
GROUPS = [*OWNED, "model", "data", "optimizer", "scheduler"]


NEEDED = {"clip=groups": ["clip.groups={*:1.0}"]}
"""Keys without a default."""


def composed(group, option):
    choice = f"{group}={option}"
    return request([choice, *NEEDED.get(choice, [])], writes=False).jobs[0].plain


def commands():
    for file in [*FILES, *sorted(find("recipes").glob("*.yaml"))]:
        for line in file.read_text().splitlines():
            if found := re.match(r"#.*?python -m runner (.*)", line):
                yield pytest.param(found[1], id=f"{file.parent.name}/{file.stem}")


@pytest.mark.parametrize("command", list(commands()))
@pytest.mark.product(every=9)
def test_the_command_that_a_file_shows_is_right(command):
    words = shlex.split(command)
    multirun = "-m" in words
    assert request([word for word in words if word != "-m"], multirun=multirun, writes=False).jobs


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.product(every=2)
def test_every_option_of_a_group_can_be_chosen(group):
    for option in options(group):
        plain = composed(group, option)
        written = OmegaConf.to_container(OmegaConf.load(find("conf") / group / f"{option}.yaml"))
        written.pop("defaults", None)
        fixed = {
            key: value
            for key, value in written.items()
            if not re.search(r"\$\{|^\?\?\?$", str(value))
        }
        assert fixed.items() <= plain[group].items()


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_file_opens_with_its_purpose(file):
    lines = file.read_text().splitlines()
    assert re.match("# .+", lines[0])
    assert file.parent.name == "hydra" or any("# python -m runner" in line for line in lines)


@pytest.mark.parametrize("group", OWNED)
def test_options_of_a_group_have_the_same_keys(group):
    """A clipping mode has its own options besides, and no others."""
    keys = set()
    for option in options(group):
        found = composed(group, option)[group]
        own = options_of(built_in(option)) if group == "clip" else {}
        assert set(own) <= set(found)
        keys.add(tuple(key for key in found if key not in own))
    assert len(keys) == 1


def test_every_mode_has_a_file_and_every_file_a_mode():
    assert options("clip") == NAMES


@pytest.mark.parametrize("group", ["clip", "plugin", "precision", "tracker"])
def test_an_option_is_called_as_its_file(group):
    for option in options(group):
        content = yaml.safe_load((find("conf") / group / f"{option}.yaml").read_text())
        assert content.get("name", content.get("mode")) == option


PLUGINS = options("plugin")


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_shows_the_keys_that_it_uses_each_with_a_comment(plugin):
    text = (find("conf") / "plugin" / f"{plugin}.yaml").read_text()
    shown = yaml.safe_load(text).keys() - {"defaults", "name", "nproc", "nnodes"}
    assert shown == {key for key, use in USES.items() if plugin in use.options}
    values = text.partition("_self_\n")[2].strip().splitlines()
    assert all("#" in line for line in values if not line.startswith("name:"))


def test_the_keys_that_plugins_share_ask_for_nothing():
    shared = yaml.safe_load((find("conf") / "plugin_keys.yaml").read_text())
    asked = {key: shared[key] for key in shared if key not in ("name", "nproc", "nnodes")}
    assert asked == {key: use.neutral for key, use in USES.items()}


@pytest.mark.parametrize("option", options("data"))
def test_what_all_data_share_is_given_once(option):
    shared = yaml.safe_load((find("conf") / "data_keys.yaml").read_text())
    assert shared == {"num_workers": 0, "drop_last": False}
    written = yaml.safe_load((find("conf") / "data" / f"{option}.yaml").read_text())
    assert not shared.items() & {key: written.get(key) for key in shared}.items()
    assert request([f"data={option}"], writes=False).jobs[0].plain["data"].keys() >= shared.keys()


OF_TORCH = [one for one in options("optimizer") if one not in ("lion", "muon")]
# Those two: tests/train/test_optimizer_choices.py.


@pytest.mark.parametrize("option", OF_TORCH)
def test_torch_takes_the_keys_of_an_optimizer(option):
    torch = pytest.importorskip("torch")
    target = request([f"optimizer={option}"], writes=False).jobs[0].config.optimizer
    cls = getattr(torch.optim, target.target.removeprefix("torch.optim."))
    assert target.arguments.keys() <= inspect.signature(cls).parameters.keys()
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = cls([parameter], **target.arguments)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert (parameter < 1).all()


def test_a_constant_rate_is_exactly_constant():
    torch = pytest.importorskip("torch")
    target = request(["scheduler=constant"], writes=False).jobs[0].config.scheduler
    cls = getattr(torch.optim.lr_scheduler, target.target.rpartition(".")[2])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = cls(optimizer, **target.arguments)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.1] * 5


def test_the_index_gives_the_promised_defaults():
    plain = request([], writes=False).jobs[0].plain
    assert plain["train"] == {"max_duration": "15ep"}
    assert plain["eval"] == {"interval": "1ep", "metrics": []}
    assert plain["log"] == {"interval": 1, "flush": 50}
    assert plain["checkpoint"] == {
        "interval": "10min",
        "keep": 2,
        "keep_best": True,
        "save_final": True,
        "asynchronous": "auto",
    }
    assert plain["telemetry"] == {
        "per_layer": False,
        "worst_layers": 0,
        "update_ratio": False,
        "clip_cosine": False,
        "noise_scale": False,
        "spike_score": False,
        "spike_sigma": 6.0,
        "spike_window": 128,
        "probe": 0,
    }
    assert plain["launch"] == {"timeout": 600, "max_restarts": 0}
    assert plain["verify"] == {
        "steps": 4,
        "dtype": "float64",
        "tolerance": None,
        "lr": 0.1,
        "modes": None,
    }
    assert (plain["seed"], plain["device"], plain["recipe"]) == (0, "auto", "none")
    adaptive = request(["clip=adaptive"], writes=False).jobs[0].plain
    assert adaptive["clip"]["eps"] == 1e-3
