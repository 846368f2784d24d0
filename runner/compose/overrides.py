"""Parse the overrides of a request, ``key=value``, and expand lists of values into jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, product

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

from runner.config.clip_section import Clip
from runner.config.problem import NOTHING, Problem, or_list

SWEEP_WITHOUT_FLAG = (
    "a list of values is a sweep: add -m; a list as one value goes in brackets, [a,b], and text "
    "with a comma in quotes"
)


def read(words: Iterable[str], loader: ConfigLoader) -> tuple[list[Override], list[Problem]]:
    """Parse overrides.

    Returns:
        The parsed overrides, and a problem for each one that cannot be parsed.
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


def with_own_mode(given: Sequence[str]) -> list[str]:
    """Let ``clip._target_=package.Mode`` and the mode's options be given without ``+``.

    Files of ``conf/clip`` have no place for them, so Hydra would ask for it.

    Args:
        given: overrides, as typed.

    Returns:
        The overrides with ``++`` before each key that only a user's mode has.
    """
    keys = [override.lstrip("+").partition("=")[0] for override in given]
    if "clip._target_" not in keys:
        return list(given)
    return [
        f"++{override.lstrip('+')}"
        if key.startswith("clip.") and key.split(".")[1] not in Clip.model_fields
        else override
        for key, override in zip(keys, given, strict=True)
    ]


def jobs(
    overrides: Sequence[Override],
    loader: ConfigLoader,
    refuse: Callable[[str], Problem | None],
    *,
    together: Sequence[str] = (),
    enumerated: bool = True,
) -> tuple[list[JobOverrides], list[Problem]]:
    """Return the jobs of a sweep: every combination of the listed values.

    As in Hydra's own sweeper, the last override of a key holds.

    Args:
        overrides: overrides of the sweep.
        loader: Hydra's loader, which lists groups and their options.
        refuse: returns the problem of a listed value that no job can have.
        together: keys whose lists advance together.
        enumerated: whether the jobs are all combinations. False for a sweeper that chooses its
            jobs: then each value, and each end of an interval, comes once.

    Returns:
        The overrides of each job, and a problem for each wrong list and each refused value.
    """
    values: dict[str, list[str]] = {}
    problems: list[Problem] = []
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            values[key] = [plain_word(override)]
            continue
        try:
            found = _listed(override)
        except (HydraException, ValueError, ArithmeticError) as error:
            problems.append(Problem(key, override.get_value_string(), f"cannot be read: {error}"))
            continue
        if override.is_hydra_override():
            problems.append(_no_sweep(override, "one value: Hydra's own keys cannot be swept over"))
        elif override.key_or_group.partition(".")[0] == "sweep":
            problems.append(_no_sweep(override, "one value: all runs of a sweep share it"))
        elif override.is_interval_sweep() and enumerated:
            problems.append(_no_sweep(override, "a list of values, or range(start,stop,step)"))
        elif not found:
            problems.append(_no_sweep(override, _what_exists(override, loader)))
        else:
            listed = {f"{key}={value}": refuse(f"{key}={value}") for value in found}
            problems += (problem for problem in listed.values() if problem)
            kept = [f"{key}={value}" for value in found if not listed[f"{key}={value}"]]
            values[key] = kept or list(listed)[:1]  # so that the other overrides are checked too
    if together and (problem := _not_together(values, together, enumerated)):
        return [], [*problems, problem]
    if not enumerated:
        return _one_by_one(values), problems
    return _combinations(values, together), problems


def only_for_sweeps(overrides: Iterable[Override]) -> list[Problem]:
    """Return a problem for each override that only a sweep accepts, since none is asked for."""
    homes = ("sweep", "hydra.sweep", "hydra.sweeper", "hydra/sweeper", "hydra.launcher")
    return [
        Problem(
            override.get_key_element(),
            NOTHING if override.is_delete() else override.value(),
            "goes with a sweep, and this is one run: add -m",
        )
        for override in overrides
        # A list is refused as such: one run takes none.
        if not override.is_sweep_override()
        and (
            override.key_or_group.startswith((*(f"{home}." for home in homes), "hydra/launcher"))
            or override.key_or_group in homes
        )
    ]


def given_twice(overrides: Iterable[Override]) -> list[str]:
    """Return a sentence for each key or group that is given several values: only one holds."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        values.setdefault(override.key_or_group, []).append(override.input_line or "")
    return [
        f"{key} is given {len(given)} times: {given[-1]} holds, since it comes last"
        for key, given in values.items()
        if len(set(given)) > 1
    ]


def _listed(override: Override) -> list[str]:
    """Return the values of a list, or both ends of an interval."""
    if override.is_interval_sweep():
        interval = override.value()
        assert isinstance(interval, IntervalSweep)
        return [str(interval.start), str(interval.end)]
    return list(override.sweep_string_iterator())


def _combinations(values: dict[str, list[str]], together: Sequence[str]) -> list[JobOverrides]:
    """Return every combination; the lists of ``together`` count as one."""
    lists: list[list[list[tuple[str, bool]]]] = []
    zipped = [key for key in values if key in together]
    for key, choices in values.items():
        if key in zipped[1:]:
            continue
        keys = zipped if key in zipped else [key]
        rows = zip(*(values[one] for one in keys), strict=True)
        lists.append([[(word, len(choices) > 1) for word in row] for row in rows])
    return [JobOverrides(chain.from_iterable(combination)) for combination in product(*lists)]


def _one_by_one(values: dict[str, list[str]]) -> list[JobOverrides]:
    """Return a job of all first values, and one job for each other value."""
    first = {key: choices[0] for key, choices in values.items()}
    varied = [{**first, key: word} for key, choices in values.items() for word in choices[1:]]
    return [
        JobOverrides((word, len(values[key]) > 1) for key, word in chosen.items())
        for chosen in [first, *varied]
    ]


def _not_together(
    values: dict[str, list[str]], together: Sequence[str], enumerated: bool
) -> Problem | None:
    """Return why the lists of some keys cannot advance together."""
    shown = list(together)
    if not enumerated:
        return Problem("sweep.zip", shown, "goes with Hydra's own sweeper, hydra/sweeper=basic")
    if missing := [key for key in together if len(values.get(key, ())) < 2]:
        lists = ", ".join(key for key, choices in values.items() if len(choices) > 1) or "none"
        message = f"no list is given for {', '.join(missing)}  (lists: {lists})"
        return Problem("sweep.zip", shown, message)
    lengths = {key: len(values[key]) for key in together}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        return Problem("sweep.zip", shown, f"these lists must be equally long: {said}")
    return None


class JobOverrides:
    """The overrides of one job of a sweep.

    Attributes:
        words: all overrides.
        apart: overrides that set it apart from the other jobs.
        label: the same as one line.
    """

    def __init__(self, combination: Iterable[tuple[str, bool]]) -> None:
        combination = list(combination)
        self.words = [word for word, _ in combination]
        self.apart = [word for word, varies in combination if varies]
        self.label = " ".join(self.apart)


def shared(overrides: Iterable[Override]) -> list[str]:
    """Return the overrides that list no values, as Hydra reads them."""
    return [plain_word(override) for override in overrides if not override.is_sweep_override()]


def plain_word(override: Override) -> str:
    """Return the text of an override that lists no values."""
    if override.is_delete() and override.value() is None:
        return override.get_key_element()
    return f"{override.get_key_element()}={override.get_value_string()}"


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
