"""Say what is wrong with a request: one message for all problems, with the nearest right names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any

from runner.config.masking import hidden, masked, masked_words
from runner.config.notation import plural

MISSING = "???"  # how a configuration file marks a value that somebody must give
NOTHING: Any = ...  # no value, where None is a value


def shown(value: Any) -> str:
    """Return ``value`` as a user types it; text that YAML would read as another type is quoted."""
    match value:
        case None | bool():
            return "null" if value is None else str(value).lower()
        case str():
            other = value.strip() != value or value.lower() in {"", "null", "true", "false"}
            with suppress(ValueError):  # a file has no other way to write nan and inf
                other = other or isfinite(float(value))
            return repr(value) if other else value
        case list() | tuple():
            return "[" + ",".join(map(shown, value)) + "]"
        case dict():
            return "{" + ",".join(f"{key}:{shown(one)}" for key, one in value.items()) + "}"
    return str(value)


@dataclass(frozen=True)
class Problem:
    key: str
    value: Any
    message: str
    job: str = ""

    @property
    def word(self) -> str:
        [key] = masked_words([str(self.key)])
        if self.value is NOTHING:
            return _brief(key)
        return f"{_brief(key)}={_brief(hidden(shown(masked(self.value, self.key))))}"


def _brief(text: str, longest: int = 400) -> str:
    """Return ``text`` on one line, without its middle if it would fill a screen."""
    text = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} … {text[-20:]} ({len(text):,} characters)"


class RequestError(Exception):
    """A request cannot be run; the text of the exception names every problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        width = min(max((len(one.word) for one in self.problems), default=0), 40)
        text = f"clip-runner: this request cannot be run ({plural(len(self.problems), 'problem')})"
        for one in self.problems:
            place = f"  (in the job {_brief(one.job)})" if one.job else ""
            text += f"\n  {one.word:<{width}}  {_brief(hidden(one.message), 4000)}{place}"
        return text


class RefusedOnAllRanks(RequestError):
    """A request of several ranks cannot be run, and each of them raises this error."""


# Names of other programs, whose spelling is not near ours, or is nearer to a wrong one (gpu: cpu).
_OURS = {
    "fp16": ("16", "amp", "float16", "half"),
    "bf16": ("bfloat16",),
    "cuda": ("gpu",),
    "float64": ("fp64",),
    "rowwise": ("row",),
    "plugin.nproc": ("devices", "gpus", "nproc_per_node"),
    "plugin.tp_size": ("tensor_parallel_size",),
    "train.max_duration": ("epochs",),
    "accumulation.steps": ("gradient_accumulation_steps",),
    "clip.threshold": ("gradient_clip_val", "max_grad_norm"),
    "optimizer.lr": ("learning_rate", "lr"),
}
_ELSEWHERE = {name: our for our, names in _OURS.items() for name in names}


def did_you_mean(name: Any, names: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` to end a message; empty if no name is near."""
    lower, by_lower = str(name).lower(), {other.lower(): other for other in names}
    meant = _ELSEWHERE.get(lower, "")
    near = [meant] if meant in by_lower else get_close_matches(lower, by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def unknown_key(key: str, known: Iterable[str], value: Any = NOTHING) -> Problem:
    """Return the problem of a key that does not exist, with the names that are near."""
    known = set(known) - {key}
    sections = {name.partition(".")[0] for name in known}
    swapped = [f"{value}={key}"] if str(value) in sections and "." not in key else []
    near = swapped or _nearest_keys(key, sorted(known | sections - {key}))
    message = f"unknown key; did you mean {or_list(near)}?" if near else "unknown key"
    section = key.rpartition(".")[0]
    beside = sorted({name[len(section) + 1 :] for name in known if name.startswith(f"{section}.")})
    listed, of = (beside, f" of {section}") if section and beside else (sorted(sections), "")
    return Problem(key, value, f"{message}  (keys{of}: {', '.join(listed)})")


def _nearest_keys(key: str, keys: list[str]) -> list[str]:
    """Return the dotted ``keys`` that ``key`` most likely means, best first, at most three."""
    section, _, last = key.lower().rpartition(".")
    same = [other for other in keys if other.rpartition(".")[2] == last]
    # A name of other programs counts if the rest of ``key`` does not say which key is meant.
    if (meant := _ELSEWHERE.get(last)) in keys and not (section and same):
        return [meant]
    if same or (same := get_close_matches(key, keys, n=1, cutoff=0.8)):
        return same[:3]
    near = get_close_matches(last, {other.rpartition(".")[2] for other in keys}, n=1)
    return [other for other in keys if other.rpartition(".")[2] in near][:3]


def leaves(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield each dotted key at and below ``path`` with its value; a list is one value."""
    if not isinstance(node, Mapping) or not node:
        yield path, node
        return
    for key, value in node.items():
        yield from leaves(f"{path}.{key}" if path else str(key), value)


def or_list(names: Iterable[Any]) -> str:
    """Format at least one name: ``a``, ``a or b``, ``a, b or c``."""
    names = list(map(str, names))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
