"""Read overrides: ``KEY=VALUE`` and ``GROUP=OPTION``, their short forms, keys that are repeated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.core.override_parser.types import Override as HydrasOverride
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


@dataclass(frozen=True)
class Override:
    """One override, read by Hydra's parser.

    Attributes:
        typed: its text as it was typed.
        text: its text as it is spelled out, such as ``resume.from=RUN`` for ``resume=RUN``.
        signed_key: the key or the group, with its package and its signs.
        key: the same without signs.
        group: the same without signs and package.
        value: the value in plain containers; what Hydra makes of a list of values.
        value_text: the value as it is spelled out.
        lists: whether it lists values, for a sweep.
        adds: whether the key may be new, as it has a plus.
        removes: whether the key is removed, as it has a ``~``.
        is_for_hydra: whether the key is one of Hydra's own.
        parsed: what Hydra's parser has made.
    """

    typed: str
    text: str
    signed_key: str
    key: str
    group: str
    value: Any
    value_text: str
    lists: bool
    adds: bool
    removes: bool
    is_for_hydra: bool
    parsed: HydrasOverride


def read_typed(texts: Iterable[str]) -> tuple[list[Override], list[Problem]]:
    """Return the overrides that a user typed, and a problem for each that is none.

    Keys that are given twice are problems too: the last value alone would count.
    ``~key +key=value`` gives a key once, and so do equal overrides.
    """
    overrides, problems = read_overrides(texts)
    problems += _repeated(overrides)
    return overrides, problems


def read_overrides(texts: Iterable[str]) -> tuple[list[Override], list[Problem]]:
    """Return the parsed overrides, and a problem for each text that is none.

    A Composer has to be active: Hydra's parser asks its groups.
    """
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    overrides: list[Override] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            overrides.append(_read(text, parser))
        except Exception:  # HydraException, RecursionError, ValueError of a number
            spelled = spelled_out(text)
            problems.append(Problem(spelled, NOTHING, _why_unreadable(spelled)))
    return overrides, problems


def _read(text: str, parser: OverridesParser) -> Override:
    """Read one override, and remember the secrets in it."""
    spelled = spelled_out(text)
    if _IN_NO_FILE.search(spelled):
        raise ValueError(spelled)
    OmegaConf.create([spelled])  # Hydra records it, which fails for ${.}
    [parsed] = parser.parse_overrides([spelled])
    value = parsed.value()
    signed_key = parsed.get_key_element()
    choices = value
    if isinstance(value, ChoiceSweep):
        choices = [getattr(item, "text", item) for item in value.list]
    remember(secrets_in(choices, signed_key))
    return Override(
        typed=text,
        text=spelled,
        signed_key=signed_key,
        key=signed_key.lstrip("+~"),
        group=parsed.key_or_group,
        value=value,
        value_text=spelled.partition("=")[2],
        lists=parsed.is_sweep_override(),
        adds=parsed.is_add() or parsed.is_force_add(),
        removes=parsed.is_delete(),
        is_for_hydra=parsed.is_hydra_override(),
        parsed=parsed,
    )


_NAME = r"(?:\w+\.)+[^\W\d]\w*"
_SECTIONS = "|".join((*OPEN, r"data\.collate"))
_TARGET = re.compile(rf"^({_SECTIONS})=({_NAME}(?:,{_NAME})*)$")
_SHORT = re.compile(rf"^(\+*)({'|'.join(SHORT)})=(?!{{)")
_CALLBACKS = re.compile(r"callbacks=\[((?:\w+\.)+\w+(?:,(?:\w+\.)+\w+)*)\]")


def spelled_out(text: str) -> str:
    """Return an override without its short form.

    ``resume=RUN`` is ``resume.from=RUN``, a class for a section is the ``_target_`` of the section,
    and so is each in ``callbacks=[mine.Printer]``.
    """
    callbacks = _CALLBACKS.fullmatch(text)
    if callbacks is not None:
        targets = [f"{{_target_:{name}}}" for name in callbacks[1].split(",")]
        return f"callbacks=[{','.join(targets)}]"
    short = _SHORT.match(text)
    if short is not None:
        return f"{short[1]}{SHORT[short[2]]}={text[short.end() :]}"
    return _TARGET.sub(r"\1._target_=\2", text)


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


def _repeated(overrides: Sequence[Override]) -> Iterator[Problem]:
    """Yield a problem for each override that gives a key again, and so hides an earlier one."""
    earlier: dict[str, Override] = {}
    for override in overrides:
        for key in sorted(_keys_of(override)):
            before = earlier.get(key)
            earlier[key] = override
            if before is not None and _hides(override, before):
                first, second = masked_words([before.typed, override.typed])
                message = f"is given twice ({first} and {second}): leave one of them out"
                yield Problem(key, NOTHING, message)
                break


def _hides(override: Override, before: Override) -> bool:
    """Return whether an override hides another one of the same key, which was typed before."""
    return before.typed != override.typed and not (before.removes and override.adds)


def _keys_of(override: Override) -> set[str]:
    """Return the keys that an override sets: as they are typed, and as they are spelled out."""
    if isinstance(override.value, dict):
        return {key for key, _ in leaves(override.key, override.value)} - {override.key}
    return {override.typed.partition("=")[0].lstrip("+~"), override.key}
