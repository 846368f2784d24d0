"""Say what is wrong with a request: one message for all problems, with the nearest right names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(value) if _needs_quotes(value) else value
        case list() | tuple():
            return "[" + ",".join(shown(item) for item in value) + "]"
        case dict():
            return "{" + ",".join(f"{key}:{shown(item)}" for key, item in value.items()) + "}"
    return str(value)


def _needs_quotes(text: str) -> bool:
    """Return whether YAML would read a text as another type, or without its spaces."""
    if text.strip() != text or text.lower() in {"", "null", "true", "false"}:
        return True
    try:
        return isfinite(float(text))  # a file has no other way to write nan and inf
    except ValueError:
        return False


@dataclass(frozen=True)
class Problem:
    """What is wrong with the value of a key, or with a text that is no override.

    ``suggestion`` is the name that was probably meant, which the message names too; "" for none.
    """

    key: str
    value: Any
    message: str
    suggestion: str = ""
    job: str = ""

    @property
    def word(self) -> str:
        """The key with its value, as it is typed; secrets are masked."""
        [key] = masked_words([str(self.key)])
        if self.value is NOTHING:
            return _brief(key)
        return f"{_brief(key)}={_brief(hidden(shown(masked(self.value, self.key))))}"


def _brief(text: str, longest: int = 400) -> str:
    """Return ``text`` on one line, without its middle if it would fill a screen."""
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} … {text[-20:]} ({len(text):,} characters)"


class RequestError(Exception):
    """A request cannot be run; the text of the exception names every problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(_once(problems))
        super().__init__(self.problems)

    def __str__(self) -> str:
        width = min(max((len(problem.word) for problem in self.problems), default=0), 40)
        count = plural(len(self.problems), "problem")
        lines = [f"clip-runner: this request cannot be run ({count})"]
        for problem in self.problems:
            message = _brief(hidden(problem.message), 4000)
            job = f"  (in the job {_brief(problem.job)})" if problem.job else ""
            lines.append(f"  {problem.word:<{width}}  {message}{job}")
        return "\n".join(lines)


class Suggesting(Exception):
    """An error about a wrong name; ``suggestion`` is the name that was probably meant, or ""."""

    def __init__(self, message: str, suggestion: str = "") -> None:
        super().__init__(message)
        self.suggestion = suggestion


class ArgumentError(ValueError):
    """A wrong argument of a function or class that a configuration may name.

    Attributes:
        argument: its name.
    """

    def __init__(self, argument: str, reason: str) -> None:
        super().__init__(f"{argument} {reason}")
        self.argument = argument


def _once(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield each problem once; it names a job only if no other job has it too."""
    jobs: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        jobs.setdefault((problem.word, problem.message), []).append(problem)
    for same in jobs.values():
        yield same[0] if len(same) == 1 else replace(same[0], job="")


class RefusedOnAllRanks(RequestError):
    """A request of several ranks cannot be run, and each of them raises this error."""


# Names of other programs, whose spelling is not near ours, or is nearer to a wrong one (gpu: cpu).
_NAMES_ELSEWHERE = {
    "fp16": ("16", "16-mixed", "amp", "float16", "half"),
    "bf16": ("bf16-mixed", "bf16-true", "bfloat16"),
    "fp32": ("32", "32-true", "float32"),
    "cuda": ("gpu",),
    "float64": ("fp64",),
    "rowwise": ("row",),
    "plugin": ("strategy",),
    "plugin.nproc": ("devices", "gpus", "nproc_per_node"),
    "plugin.tp_size": ("tensor_parallel_size",),
    "train.max_duration": ("epochs", "max_epochs", "max_steps", "num_epochs", "num_train_epochs"),
    "data.batch_size": ("per_device_train_batch_size", "train_batch_size"),
    "accumulation.steps": (
        "accumulate_grad_batches",
        "accumulation_steps",
        "grad_accum",
        "gradient_accumulation_steps",
    ),
    "clip.threshold": (
        "clip_grad",
        "clip_norm",
        "clip_value",
        "grad_clip",
        "gradient_clip_val",
        "max_grad_norm",
        "max_norm",
    ),
    "optimizer.lr": ("base_lr", "learning_rate", "lr"),
    "scheduler.warmup_fraction": ("warmup", "warmup_ratio"),
    "scheduler.warmup_steps": ("num_warmup_steps", "warmup_steps"),
    "model.weights": ("pretrained", "weights"),
    "tracker": ("logger", "report_to", "wandb"),
}
_OURS = {name: ours for ours, names in _NAMES_ELSEWHERE.items() for name in names}
_OPTIONS_WITH = {
    "scheduler.warmup_fraction": "scheduler=linear_warmup_cosine",
    "scheduler.warmup_steps": "scheduler=linear_warmup_cosine",
}
"""Keys that not every option of their group has, each with an option that does."""

_SETTINGS_ELSEWHERE = {("wandb", False): "tracker=none", ("wandb", True): "tracker=wandb"}
"""Keys with values of other programs, and what they are called here."""


def near_name(name: Any, names: Iterable[str]) -> str:
    """Return which of ``names`` was probably meant by ``name``; empty if none is near."""
    lower = str(name).lower()
    by_lower = {candidate.lower(): candidate for candidate in names}
    meant = _OURS.get(lower, "")
    if meant in by_lower:
        return by_lower[meant]
    matches = get_close_matches(lower, by_lower, n=1)
    return by_lower[matches[0]] if matches else ""


def did_you_mean(name: Any, names: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` to end a message; empty if no name is near."""
    return _question(near_name(name, names))


def _question(suggestion: str) -> str:
    return f"; did you mean {suggestion}?" if suggestion else ""


def unknown_key(key: str, known: Iterable[str], value: Any = NOTHING) -> Problem:
    """Return the problem of a key that does not exist, with the names that are near."""
    keys = set(known) - {key}
    sections = {name.partition(".")[0] for name in keys}
    if str(value) in sections and "." not in key:  # KEY=VALUE, typed the wrong way round
        suggestion = f"{value}={key}"
    elif isinstance(value, bool) and (key, value) in _SETTINGS_ELSEWHERE:
        suggestion = _SETTINGS_ELSEWHERE[key, value]
    else:
        suggestion = or_list(_nearest_keys(key, sorted(keys | sections - {key})))
        if suggestion in _OPTIONS_WITH and suggestion not in keys:
            suggestion += f", with {_OPTIONS_WITH[suggestion]}"
    section = key.rpartition(".")[0]
    beside = {name.removeprefix(f"{section}.") for name in keys if name.startswith(f"{section}.")}
    if section and beside:
        listed = f"keys of {section}: {', '.join(sorted(beside))}"
    else:
        listed = f"keys: {', '.join(sorted(sections))}"
    message = f"unknown key{_question(suggestion)}  ({listed})"
    return Problem(key, value, message, suggestion)


def _nearest_keys(key: str, keys: Sequence[str]) -> Sequence[str]:
    """Return the dotted ``keys`` that ``key`` most likely means, best first, at most three."""
    section, _, last = key.lower().rpartition(".")
    top = section.partition(".")[0]
    same_end = _by_end(keys).get(last, [])
    beside = [candidate for candidate in keys if candidate.startswith(f"{top}.")] if top else []
    near_beside = get_close_matches(last, _by_end(beside), n=1)
    # A name of other programs counts if the rest of ``key`` does not say which key is meant.
    meant = _OURS.get(last, "")
    if meant in keys or meant in _OPTIONS_WITH:
        fits = not top or meant.startswith(f"{top}.") or meant in same_end
        if fits or not (same_end or near_beside):
            return [meant]
    if same_end:
        return same_end[:3]
    # A key of another section may look alike, and means something else.
    keys = beside or keys
    near = get_close_matches(key, keys, n=1, cutoff=0.8)
    if near:
        return near
    by_end = _by_end(keys)
    for end in get_close_matches(last, by_end, n=1):
        return by_end[end][:3]
    return []


def _by_end(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return dotted keys by their last parts."""
    by_end: dict[str, list[str]] = {}
    for key in keys:
        by_end.setdefault(key.rpartition(".")[2], []).append(key)
    return by_end


def leaves(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield each dotted key at and below ``path`` with its value; a list is one value."""
    if not isinstance(node, Mapping) or not node:
        yield path, node
        return
    for key, value in node.items():
        yield from leaves(f"{path}.{key}" if path else str(key), value)


def or_list(names: Iterable[Any]) -> str:
    """Format names: ``a``, ``a or b``, ``a, b or c``; empty if there is none."""
    texts = [str(name) for name in names]
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} or {texts[-1]}"
