"""Answers to the flags that print and run nothing: ``--help``, ``--cfg`` and Hydra's own."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from string import Template
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic.fields import FieldInfo

from runner.config.check import owned_keys
from runner.config.folders import find
from runner.config.masking import hidden, masked, masked_words
from runner.config.problem import NOTHING, Problem, RequestError, leaves, shown, unknown_key
from runner.config.schema import SHORT, RunConfig
from runner.request.composer import Composer
from runner.request.composition import reason, refer_to
from runner.request.overrides import OPEN
from runner.request.recipes import purpose
from runner.request.request import Request

_CHOSEN = {"plugin.name", "clip.mode", "precision.name", "tracker.name", "recipe"}
"""Keys that are set by choosing an option of a group."""

EVERY_KEY = "all"
"""What ``--help`` takes beside the names of sections and keys."""

_ARGUMENTS = """
Keys of model, data, optimizer, scheduler and loss without a description are arguments of their
_target_. One that is not listed is added with a plus: +optimizer.maximize=true. A class of your
own takes the place of an option and its arguments: model=mine.Net model.width=64
"""
_WIDTH = 80  # columns of the text of --help


def help_text(request: Request, topics: Sequence[str]) -> str:
    """Return the text of ``--help``: in short, or all that it says about some topics.

    Args:
        request: a request whose values are shown.
        topics: names of sections or keys, "recipe", or "all".
    """
    config = request.composition.config
    with request.composer.active():
        groups = {*GlobalHydra.instance().config_loader().list_groups("")} - {"hydra", "recipe"}
        options = {group: ", ".join(request.composer.options(group)) for group in sorted(groups)}
        purposes = {name: purpose(file) for name, file in request.composer.recipes.items()}
    if topics:
        return _about(config, topics, options, purposes)
    parts = {
        "GROUPS": _wrapped_table(options),
        "RECIPES": _wrapped(", ".join(purposes), "  "),
        "SECTIONS": _wrapped(", ".join(sorted({*_names(config, groups)})), "  "),
    }
    return Template(config.hydra.help.template).safe_substitute(parts)


def _names(config: DictConfig, groups: Iterable[str]) -> set[str]:
    """Return the sections of a configuration that are no group of options."""
    return {str(name) for name in config if name in RunConfig.model_fields} - {*groups, "recipe"}


def _about(
    config: DictConfig,
    topics: Sequence[str],
    options: Mapping[str, str],
    purposes: Mapping[str, str],
) -> str:
    """Return the options, recipes and keys of some topics."""
    keys = _keys(config)
    if EVERY_KEY in topics:
        return _table(_key(config, name, keys[name]) for name in keys) + _ARGUMENTS
    text = ""
    for topic in topics:
        group = topic.partition(".")[0]
        names = [name for name in keys if name == topic or name.startswith(f"{topic}.")]
        if topic == "recipe":
            text += _table(purposes.items())
        elif topic in options or topic in _CHOSEN:
            text += _wrapped_table({f"{group}=": options[group]})
        elif not names:
            raise RequestError([unknown_key(topic, keys)])
        text += _table(_key(config, name, keys[name]) for name in names)
    return text


def _keys(config: DictConfig) -> dict[str, FieldInfo | None]:
    """Return all keys of a composition by section, each with its field where it is ours."""
    plain: Any = OmegaConf.to_container(config)
    owned = owned_keys(plain)
    arguments = [key for section in OPEN for key, _ in leaves(section, plain.get(section))]
    names = [name for name in dict.fromkeys((*owned, *arguments)) if name not in _CHOSEN]
    keys = {}
    for section in plain:
        for name in names:
            if name.partition(".")[0] == section:
                keys[name] = owned.get(name)
    return keys


def _key(config: DictConfig, name: str, field: FieldInfo | None) -> tuple[str, str]:
    """Return a key as it is typed, with its value, and what it means."""
    default = None if field is None else field.get_default()
    value = OmegaConf.select(config, name, default=default)
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    meaning = "" if field is None else field.description or ""
    short_forms = {key: section for section, key in SHORT.items()}
    return f"{short_forms.get(name, name)}={hidden(shown(masked(value, name)))}", meaning


def _table(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return "".join(f"  {name:<{width}}  {text}".rstrip() + "\n" for name, text in rows)


def _wrapped_table(rows: Mapping[str, str]) -> str:
    """Return a table of names and texts, whose texts are wrapped in their column."""
    width = max(len(name) for name in rows)
    return "".join(_wrapped(text, f"  {name:<{width}}  ") for name, text in rows.items())


def _wrapped(text: str, start: str) -> str:
    """Return lines of a text that begin with ``start``, and go on in its column."""
    lines = textwrap.wrap(
        text,
        width=_WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
    )
    return "\n".join(lines) + "\n"


def composed_text(request: Request, part: str, package: str, resolve: bool) -> str:
    """Return the answer to ``--cfg``: the part job, hydra or all of a configuration."""
    config = request.composition.config
    parts = {"job": {*config} - {"hydra"}, "hydra": {"hydra"}, "all": {*config}}
    with request.composer.active():
        refer_to(config)
        node: Any = OmegaConf.masked_copy(config, [*parts[part]])
        try:
            node = OmegaConf.select(node, package.removeprefix("_global_"), default=NOTHING)
            if node is NOTHING:
                raise RequestError([Problem("--package", package, "there is no such key")])
            if not OmegaConf.is_config(node):
                return OmegaConf.to_yaml([masked(node, package)]).removeprefix("- ")
            plain = OmegaConf.to_container(node, resolve=resolve, enum_to_str=True)
            return _as_yaml(masked(_overrides_masked(plain), package))
        except OmegaConfBaseException as error:
            raise RequestError([Problem("--cfg", part, reason(error))]) from None


def _overrides_masked(plain: Any) -> Any:
    """Mask the overrides in Hydra's part of a composition, which are lists of texts."""
    hydra_part = plain.get("hydra", plain) if isinstance(plain, dict) else {}
    overrides = hydra_part.get("overrides") if isinstance(hydra_part, dict) else None
    if isinstance(overrides, dict):
        overrides.update({name: masked_words(texts) for name, texts in overrides.items()})
    return plain


def _as_yaml(plain: Any) -> str:
    """Return the YAML of plain containers as OmegaConf writes it, references as they are."""
    try:
        return OmegaConf.to_yaml(OmegaConf.create(plain))
    except OmegaConfBaseException:  # a text that only looks like a reference
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def print_answer_of_hydra(arguments: Sequence[str], config_dir: Path | None) -> None:
    """Print what Hydra answers to flags of its own, such as ``--info``, with overrides."""
    main = hydra.main(version_base="1.3", config_path=str(find("conf")), config_name="config")
    argv = sys.argv
    printed = io.StringIO()
    try:
        with Composer(config_dir).active(), redirect_stdout(printed):
            GlobalHydra.instance().clear()
            sys.argv = ["clip-runner", *arguments]
            main(print)()
    finally:  # Hydra exits after some answers
        sys.argv = argv
        print(hidden(printed.getvalue()), end="")
