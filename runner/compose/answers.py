"""Answers to the flags that print and run nothing: ``--help``, and those of Hydra."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from string import Template
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from runner.compose import recipes
from runner.compose.composer import Composer, Source
from runner.compose.request import logging_restored, request
from runner.compose.values import OPEN
from runner.config.check import owned_keys
from runner.config.problem import leaves, shown
from runner.config.schema import SHORT, RunConfig

# Keys that are set by choosing an option of a group.
_CHOSEN = {"plugin.name", "clip.mode", "precision.name", "tracker.name", "recipe"}


def help_text(given: Sequence[str], source: Source | None = None) -> str:
    """Return the text of ``--help``, with the values that the overrides ``given`` give.

    Names of sections among them ask for the keys of these sections alone.
    """
    sections = [word for word in given if word in RunConfig.model_fields]
    given = [word for word in given if word not in sections]
    wanted = request(given, source=source, writes=False)
    composer = wanted.composer
    with composer.active():
        config = wanted.composed or composer.compose([]).config  # a sweep has no single values
        groups = sorted(set(composer.loader.list_groups("")) - {"hydra", "recipe"})
        if sections:
            listed = [one for one in groups if one in sections]
            options = _table((f"{one}=", ", ".join(composer.options(one))) for one in listed)
            return options + _keys(config, sections)
        found = recipes.read_all(composer.source.recipes)
        parts = {
            "GROUPS": _table((group, ", ".join(composer.options(group))) for group in groups),
            "RECIPES": _table((recipe.name, recipe.error or recipe.purpose) for recipe in found),
            "KEYS": _keys(config),
        }
        return Template(config.hydra.help.template).safe_substitute(parts)


def answer(flags: Sequence[str], words: Sequence[str], source: Source) -> int:
    """Print what Hydra answers to flags of its own, such as ``--cfg``; return its exit code."""
    folder, printed, code, argv = str(source.folder), io.StringIO(), 0, sys.argv
    main = hydra.main(version_base="1.3", config_path=folder, config_name=source.name)(print)
    with Composer(source).active(), logging_restored(), redirect_stdout(printed):
        GlobalHydra.instance().clear()
        sys.argv = ["clip-runner", *flags, *words]
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.argv = argv
    print(printed.getvalue(), end="")
    return code


def _keys(config: DictConfig, sections: Sequence[str] = ()) -> str:
    """Return the keys with their values in this composition; those of some sections alone."""
    rows = []
    short = {key: section for section, key in SHORT.items()}
    plain: Any = OmegaConf.to_container(config)
    owned = owned_keys(plain)
    arguments = [key for one in OPEN for key, _ in leaves(one, plain[one]) if key not in owned]
    every = sorted([*owned, *arguments], key=lambda key: [*plain].index(key.partition(".")[0]))
    for name in every:
        if name in _CHOSEN or (name.partition(".")[0] not in sections and sections):
            continue
        meaning = owned[name].meaning if name in owned else ""
        default = owned[name].default if name in owned else None
        value = OmegaConf.select(config, name, default=default)
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        rows.append((f"{short.get(name, name)}={shown(value)}", meaning))
    return _table(rows)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return "".join(f"  {name:<{width}}  {rest}".rstrip() + "\n" for name, rest in rows)
