"""Which settings have which colour, and which keys that were swept are numbers."""

from __future__ import annotations

from runner.report.findings import Findings
from runner.report.look import HUES, NEUTRAL, ordered
from runner.report.settings import MODE, THRESHOLD


def colors_of(findings: Findings) -> dict[int, str]:
    """Return the colour of each setting: by the value of the number that was swept, or a hue."""
    settings = findings.settings
    numbers, choices = kinds_of(findings)
    if numbers and not choices:
        return _colors_by_value(findings, numbers[0])
    if len(settings) == 1:
        return {0: ordered(1)[0]}
    hues = iter(HUES)
    return {setting.index: next(hues, NEUTRAL) for setting in findings.listed}


def _colors_by_value(findings: Findings, key: str) -> dict[int, str]:
    """Return colours from dark to bright as a number rises; a setting without it is grey."""
    values = {setting.index: setting.number(key) for setting in findings.settings}
    steps = sorted({value for value in values.values() if value is not None})
    palette = dict(zip(steps, ordered(len(steps)), strict=True))
    return {i: NEUTRAL if value is None else palette[value] for i, value in values.items()}


def kinds_of(findings: Findings) -> tuple[list[str], list[str]]:
    """Return the keys that were swept: first the numbers, then the choices."""
    numbers: list[str] = []
    choices: list[str] = []
    for key in findings.swept:
        (numbers if _is_number(findings, key) else choices).append(key)
    return numbers, choices


def _is_number(findings: Findings, key: str) -> bool:
    """Return whether all settings have different numbers of a key, or equal ones, on one scale."""
    settings = findings.settings
    if key == THRESHOLD:
        if MODE in findings.swept:  # thresholds of several modes are on several scales
            return False
        settings = tuple(setting for setting in settings if setting.clips)
    values = {setting.number(key) for setting in settings}
    return None not in values and len(values) > 1
