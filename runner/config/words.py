"""The words of a request, ``key=value``: reading them, and the jobs that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from runner.config.nearest import or_list
from runner.config.problem import NOTHING, Problem

SWEEP_WITHOUT_FLAG = (
    "a list of values is a sweep: add -m; a list as one value goes in brackets, [a,b], and text "
    "with a comma in quotes"
)


def read(words: Iterable[str], loader: ConfigLoader) -> tuple[list[Override], list[Problem]]:
    """Read ``words``.

    Returns:
        What could be read, and the problem of each word that could not.
    """
    parser = OverridesParser.create(config_loader=loader)
    overrides, problems = [], []
    for word in words:
        try:
            if word.startswith("="):
                raise HydraException("there is no key")
            overrides += parser.parse_overrides([word])
        except HydraException as error:
            problems.append(_unreadable(word, str(error), loader))
    return overrides, problems


def jobs(
    overrides: Sequence[Override], loader: ConfigLoader, refuse: Callable[[str], Problem | None]
) -> tuple[list[Job], list[Problem]]:
    """The jobs of a sweep: every combination of the values that are listed.

    As in Hydra's own sweeper, a key that comes twice counts as it comes last.

    Args:
        overrides: the words of the sweep.
        loader: knows the groups and their options.
        refuse: the problem of a listed value that no job can have.

    Returns:
        The words of each job, those that vary apart, and the problem of each list that is none and
        of each value that is refused.
    """
    values: dict[str, list[str]] = {}
    problems: list[Problem] = []
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            values[key] = [plain_word(override)]
            continue
        try:
            found = [] if override.is_interval_sweep() else list(override.sweep_string_iterator())
        except (HydraException, ValueError, ArithmeticError) as error:
            problems.append(Problem(key, override.get_value_string(), f"cannot be read: {error}"))
            continue
        if override.is_hydra_override():
            problems.append(_no_sweep(override, "one value: Hydra's own keys cannot be swept over"))
        elif override.is_interval_sweep():
            problems.append(_no_sweep(override, "a list of values, or range(start,stop,step)"))
        elif not found:
            problems.append(_no_sweep(override, _what_exists(override, loader)))
        else:
            listed = {f"{key}={value}": refuse(f"{key}={value}") for value in found}
            problems += (problem for problem in listed.values() if problem)
            kept = [f"{key}={value}" for value in found if not listed[f"{key}={value}"]]
            values[key] = kept or list(listed)[:1]  # so that the other words are looked at too
    lists = [[(word, len(choices) > 1) for word in choices] for choices in values.values()]
    return [Job(combination) for combination in product(*lists)], problems


class Job:
    """The words of one job of a sweep.

    Attributes:
        words: all of them.
        label: those that set it apart from the other jobs, as one line.
    """

    def __init__(self, combination: Iterable[tuple[str, bool]]) -> None:
        combination = list(combination)
        self.words = [word for word, _ in combination]
        self.label = " ".join(word for word, varies in combination if varies)


def plain_word(override: Override) -> str:
    """A word that lists no values, as Hydra reads it."""
    if override.is_delete() and override.value() is None:
        return override.get_key_element()
    return f"{override.get_key_element()}={override.get_value_element_as_str()}"


def _no_sweep(override: Override, allowed: str) -> Problem:
    key = override.get_key_element()
    return Problem(key, override.get_value_string(), f"must be {allowed}")


def _what_exists(override: Override, loader: ConfigLoader) -> str:
    options = loader.get_group_options(override.key_or_group)
    if options:
        return f"a pattern that matches one of {', '.join(options)}"
    return "a list of at least one value"


def _unreadable(word: str, error: str, loader: ConfigLoader) -> Problem:
    key, equals, value = word.partition("=")
    if not equals:
        homes = [
            f"{group}={word}"
            for group in loader.list_groups("")
            if group != "hydra" and word in loader.get_group_options(group)
        ]
        near = f"; did you mean {or_list(homes)}?" if homes else ""
        return Problem(word, NOTHING, f"must be KEY=VALUE or GROUP=OPTION{near}")
    reason = error.partition("\n")[0]
    return Problem(
        key,
        value,
        f"cannot be read: {reason}; text with spaces or signs goes in quotes within quotes, "
        f"as in '{key}=\"a (b)\"'",
    )
