"""Parameters that a user names by a glob in an option of a mode, such as ``clip.exclude``."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from runner.gradients.layout import Layout, OptionError
from runner.gradients.shard import ParamShard
from runner.gradients.units import Units


def matching(layout: Layout, pattern: str, option: str) -> list[str]:
    """Return the names of parameters that match a glob, which the mode's ``option`` has.

    Raises:
        OptionError: no parameter matches.
    """
    names = layout.names
    matches = {*fnmatch.filter(names, pattern)}
    for name, whole in layout.parameters.items():
        if whole.base and fnmatch.fnmatchcase(whole.base, pattern):
            matches.add(name)
    if matches:
        return [name for name in names if name in matches]
    listed = [*names[:3], "...", *names[-3:]] if len(names) > 7 else names
    text = f"clip.{option}={pattern} matches no parameter of: {', '.join(listed)}"
    raise OptionError(option, text)


def with_units(layout: Layout, units: Mapping[str, int | Sequence[int]]) -> list[ParamShard]:
    """Return the shards with the units that a user names: dimensions of outputs by globs."""
    chosen: dict[str, Units] = {}
    for pattern, dims in units.items():
        outputs = (dims,) if isinstance(dims, int) else dims
        for name in matching(layout, pattern, "units"):
            shape = list(layout.parameters[name].shape)
            wrong = [dim for dim in outputs if not -len(shape) <= dim < len(shape)]
            if wrong:
                text = f"clip.units: {pattern} names dimension {wrong[0]} of {name} {shape}"
                raise OptionError("units", text)
            chosen[name] = Units.of_outputs(len(shape), outputs)
    shards = []
    for shard in layout.shards:
        units_of_shard = chosen.get(shard.name)
        shards.append(shard if units_of_shard is None else shard.with_units(units_of_shard))
    return shards
