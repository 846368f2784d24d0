"""Read overrides: ``KEY=VALUE`` and ``GROUP=OPTION``, their short forms, keys that are repeated."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from omegaconf import OmegaConf

from runner.config.masking import masked_words, remember, secrets_in
from runner.config.problem import NOTHING, Problem, leaves
from runner.config.schema import SHORT

OPEN = ("model", "data", "optimizer", "scheduler", "loss")
"""Sections with a target: they pass any key to it."""

_UNREADABLE = (
    "cannot be read as KEY=VALUE or GROUP=OPTION; text with spaces or signs goes in quotes within "
    "quotes, as in 'tracker.name=\"a (b)\"'"
)
_COMMANDS = ("fit", "run", "start", "train")
_TABLES = (".csv", ".json", ".jsonl", ".parquet", ".tsv")
_IN_NO_FILE = re.compile("[\0\ud800-\udfff]")


def read_overrides(texts: Iterable[str]) -> tuple[list[Override], list[Problem]]:
    """Return the parsed overrides, and a problem for each text that is none.

    A Composer has to be active: Hydra's parser asks its groups.
    """
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    overrides: list[Override] = []
    problems: list[Problem] = []
    for text in spelled_out(texts):
        try:
            overrides.append(_parsed(parser, text))
        except Exception:  # HydraException, RecursionError, ValueError of a number
            problems.append(Problem(text, NOTHING, _why_unreadable(text)))
    return overrides, problems


def _why_unreadable(text: str) -> str:
    """Return what to type instead of a text that is no override."""
    if text in _COMMANDS:
        return "a run has no command of its own: python -m runner KEY=VALUE ..."
    if text == "help":
        return "did you mean --help, or --help GROUP?"
    if text.endswith(_TABLES) and "=" not in text:
        return f"the data of a run is data=csv data.path={text} data.target=COLUMN"
    if re.fullmatch(r"\w+(\.\w+)+", text) and not re.fullmatch(r"[\d.]+", text):
        return f"has no value: {text}=VALUE, without spaces around the sign"
    if re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text):
        return "belongs to no key: KEY=VALUE is one word, without spaces around the sign"
    if re.fullmatch(r"[\w.@/+~-]+=.*,", text):
        return "ends with a comma: leave it out, or add a value"
    return _UNREADABLE


def _parsed(parser: OverridesParser, text: str) -> Override:
    if _IN_NO_FILE.search(text):
        raise ValueError(text)
    OmegaConf.create([text])  # Hydra records it, which fails for ${.}
    [override] = parser.parse_overrides([text])
    remember(secrets_in(_plain_value(override), override.get_key_element()))
    return override


def _plain_value(override: Override) -> Any:
    """Return the value of an override in plain containers, or the list of values to choose from."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return [getattr(item, "text", item) for item in value.list]
    return value


def spelled_out(texts: Iterable[str]) -> list[str]:
    """Return overrides with ``resume.from=`` for ``resume=``, ``model._target_=`` for a class."""
    name = r"(?:\w+\.)+[^\W\d]\w*"
    sections = "|".join((*OPEN, r"data\.collate"))
    target = re.compile(rf"^({sections})=({name}(?:,{name})*)$")
    short = re.compile(rf"^(\+*)({'|'.join(SHORT)})=(?!{{)")

    def with_key(match: re.Match[str]) -> str:
        return f"{match[1]}{SHORT[match[2]]}="

    with_targets = (target.sub(r"\1._target_=\2", _callbacks(text)) for text in texts)
    return [short.sub(with_key, text) for text in with_targets]


def _callbacks(text: str) -> str:
    """Return ``callbacks=[{_target_:mine.Printer}]`` for ``callbacks=[mine.Printer]``."""
    match = re.fullmatch(r"callbacks=\[((?:\w+\.)+\w+(?:,(?:\w+\.)+\w+)*)\]", text)
    if match is None:
        return text
    targets = [f"{{_target_:{name}}}" for name in match[1].split(",")]
    return f"callbacks=[{','.join(targets)}]"


def read_typed(texts: Iterable[str]) -> tuple[list[Override], list[Problem]]:
    """Return the overrides that a user typed, and a problem for each that is none.

    Keys that are given twice are problems too: the last value alone would count.
    ``~key +key=value`` gives a key once, and so do equal overrides.
    """
    overrides: list[Override] = []
    problems: list[Problem] = []
    earlier: dict[str, _Typed] = {}
    for text in texts:
        parsed, unreadable = read_overrides([text])
        overrides += parsed
        problems += unreadable
        for override in parsed:
            problems += _repeated(_Typed(text, override), earlier)
    return overrides, problems


class _Typed(NamedTuple):
    """An override with its text, as it was typed."""

    text: str
    override: Override


def _repeated(typed: _Typed, earlier: dict[str, _Typed]) -> list[Problem]:
    """Return a problem if an override gives a key again, and note its keys in ``earlier``."""
    for key in sorted(_keys_of(typed)):
        before = earlier.get(key)
        earlier[key] = typed
        if before is not None and _excludes(before, typed):
            first, second = masked_words([before.text, typed.text])
            message = f"is given twice ({first} and {second}): leave one of them out"
            return [Problem(key, NOTHING, message)]
    return []


def _excludes(before: _Typed, after: _Typed) -> bool:
    """Return whether the second of two overrides of one key hides the first."""
    if before.text == after.text:
        return False
    adds = after.override.is_add() or after.override.is_force_add()
    return not (before.override.is_delete() and adds)


def _keys_of(typed: _Typed) -> set[str]:
    """Return the keys that an override sets: as they are typed, and as they are spelled out."""
    spelled = key_of(typed.override)
    value = typed.override.value()
    if isinstance(value, dict):
        return {key for key, _ in leaves(spelled, value)} - {spelled}
    return {typed.text.partition("=")[0].lstrip("+~"), spelled}


def key_of(override: Override) -> str:
    """Return the key or the group of an override, without its signs."""
    return str(override.get_key_element().lstrip("+~"))


def text_of(override: Override) -> str:
    """Return an override as it is spelled out; empty if it was not typed."""
    return override.input_line or ""
