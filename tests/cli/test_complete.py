"""Completion in real shells: commands, flags, groups, options, keys and a folder of one's own."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from runner.cli import main as cli
from tests.cli.test_imports import HEAVY, imported
from tests.mode_names import NAMES
from tests.process import ROOT

LINES = [
    ("clip=", " ".join(f"clip={name}" for name in NAMES)),
    ("clip=n", "clip=none clip=norm"),
    ("clip.thr", "clip.threshold="),
    ("recipe=cif", "recipe=cifar10_resnet34"),
    ("clip=value train.m", "train.max_duration="),
    ("optimizer=adamw optimizer.wei", "optimizer.weight_decay="),
    ("-m model=cnn,gp", "model=cnn,gpt"),
    ("calib", "calibrate calibrate."),
    ("verify model=gp", "model=gpt"),
    ("verify calib", "calibrate."),
    ("--config-d", "--config-dir"),
    ("export --check", "--checkpoint"),
    ("bench adap", "adaptive"),
    ("--config-dir co", "conf/"),
    ("--config-dir conf model=mi", "model=mine"),
    ("plan -cd conf recipe=mi", "recipe=mine"),
    ("--config-dir conf model=mine model.wid", "model.width="),
    ("new ", ""),
    ("--config-dir nowhere model=g", "model=gated_conv model=gpt"),
    ("clip='no", ""),
]


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name, text in {
        "conf/model/mine.yaml": "_target_: own.Net\nwidth: 16\n",
        "conf/recipe/mine.yaml": "seed: 5\n",
        "bin/clip-runner": (
            f"#!{sys.executable}\nfrom runner.cli.main import start\nraise SystemExit(start())\n"
        ),
        "bin/python": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n',
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("program", "words", "offered"),
    [
        *(("clip-runner", *line) for line in LINES),
        ("python -m runner", *LINES[1]),
        ("/usr/bin/python3.11 -m runner", "plan -cd conf recipe=mi", "recipe=mine"),
    ],
)
def test_what_the_last_word_may_become(program, words, offered, home, capsys, monkeypatch):
    monkeypatch.setenv("COMP_LINE", f"{program} {words}")
    monkeypatch.delenv("COMP_POINT", raising=False)
    assert cli.main(["-sc", "query=bash"]) == 0
    shown = capsys.readouterr()
    assert (shown.out.split(), shown.err) == (offered.split(), "")


def test_only_what_stands_before_the_cursor_counts(home, capsys, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "clip-runner clip=no model=gpt")
    monkeypatch.setenv("COMP_POINT", "19")
    assert cli.main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == ["clip=none", "clip=norm"]


@pytest.mark.parametrize("asked", ["install=bsh", "install", "uninstall=bash"])
def test_another_shell_is_a_wrong_request(asked, capsys):
    assert cli.main(["-sc", asked]) == 2
    assert "install=bash, install=zsh, install=fish" in capsys.readouterr().err


def test_a_completion_imports_no_heavy_library(home, environment):
    environment = environment | {"COMP_LINE": "clip-runner model=g"}
    assert not imported("-sc query=bash", home, environment) & HEAVY


BASH = """
eval "$(clip-runner -sc install=bash)"
COMP_LINE={line} COMP_POINT=${{#COMP_LINE}}
COMP_WORDS=($COMP_LINE) COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
set -- $(complete -p "${{COMP_WORDS[0]}}")
while [[ $1 != -F ]]; do shift; done
"$2"; printf '<%s>\\n' "${{COMPREPLY[@]}}"
"""
# zsh completes in an editor alone: what would be offered is printed by compadd.
ZSH = """
autoload -Uz compinit && compinit -u -D
eval "$(clip-runner -sc install=zsh)"
compadd() {{ while [[ $1 != -- ]]; do shift; done; shift; (( $# )) && printf '<%s>\\n' "$@" }}
line={line}
words=(${{(z)line}}) CURRENT=$#words PREFIX=$words[-1]
$_comps[$words[1]]
"""
FISH = """
clip-runner -sc install=fish | source
for word in (complete -C {line}); echo "<$word>"; end
"""


@pytest.mark.parametrize("program", ["clip-runner", "python -m runner"])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes(shell, program, home, environment):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell]
    line = shlex.quote(f"{program} --config-dir conf model=m")
    path = os.pathsep.join([str(home / "bin"), os.environ["PATH"]])
    program = script.format(line=line)
    options = {"zsh": ["-f"], "fish": ["--no-config"]}.get(shell, ["--norc"])
    done = subprocess.run(
        [shell, *options, "-c", program],
        env=environment | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    offered = [f"model={name}" for name in ("masked", "mine", "moe")]
    shown = [line.strip("<>") for line in done.stdout.splitlines()]
    if shell == "bash":  # it replaces what follows the "=", and adds no space of its own
        offered = [f"{word.partition('=')[2]} " for word in offered]
    assert shown == offered, done.stderr
    assert done.stderr == ""
