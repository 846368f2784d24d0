"""How many ranks a plugin asks for, and how ranks are dealt to its axes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from runner.config.nearest import or_list

if TYPE_CHECKING:
    from runner.config.plugin_section import PluginSection


class Sizes(NamedTuple):
    """Ranks along each axis; dp · tp · pp is all of them.

    Attributes:
        dp: data-parallel ranks, each of which reads samples of its own.
        tp: ranks that share the weights of a layer.
        pp: ranks that hold the layers one after the other.
        ep: of the data-parallel ranks, those that share the experts of a layer; it divides ``dp``.
    """

    dp: int
    tp: int
    pp: int
    ep: int


class SizeError(ValueError):
    """Sizes that do not multiply to the ranks.

    Attributes:
        key: the key of the section ``plugin`` to change.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def sizes(plugin: PluginSection, ranks: int, *, joined: bool = False) -> Sizes:
    """How ``ranks`` are dealt to the axes of ``plugin``.

    A ``tp_size`` or ``pp_size`` of null takes all the ranks that the other sizes leave; else a
    ``dp_size`` of null does. An ``ep_size`` of null is the number of data-parallel ranks.

    Args:
        plugin: the section.
        ranks: in all.
        joined: whether an outer launcher started them, which alone can start others.

    Raises:
        SizeError: they do not go; the message has the numbers and a way out.
    """
    if plugin.name == "single" and ranks != 1:
        message = f"plugin=single is one process, not {ranks} ranks; plugin=ddp spreads over ranks"
        raise SizeError("nproc", message)
    given = _given(plugin)
    whole = prod(given.values())
    rest = _open_size(plugin)
    if rest is None and ranks != whole:
        way = _way_out([whole], joined)
        raise SizeError("nproc", f"{ranks} ranks are not {_product(given)}: {way}")
    if ranks % whole:
        below = ranks - ranks % whole
        way = _way_out([below, below + whole], joined)
        raise SizeError("nproc", f"{ranks} ranks are no multiple of {_product(given)}: {way}")
    if rest is not None:
        given[rest] = ranks // whole
    # With ``tp_size`` or ``pp_size`` left open, no ``dp_size`` means one data-parallel rank.
    dp = given.get("dp_size", 1)
    ep = dp if plugin.ep_size is None else plugin.ep_size
    if dp % ep:
        fitting = [str(size) for size in range(1, dp + 1) if dp % size == 0]
        way = f"give plugin.ep_size={or_list(fitting)}, or another plugin.dp_size"
        message = f"{ep} ranks cannot share the experts of {dp} data-parallel ranks evenly: {way}"
        raise SizeError("ep_size", message)
    return Sizes(dp, given.get("tp_size", 1), given.get("pp_size", 1), ep)


def least_ranks(plugin: PluginSection) -> int:
    """Local ranks to start: ``nproc``, or what the sizes that are given multiply to.

    Experts ask for as many data-parallel ranks as share them.
    """
    if plugin.nproc is not None:
        return plugin.nproc
    experts = (plugin.ep_size or 1) if plugin.dp_size is None else 1
    return experts * prod(_given(plugin).values())


def may_grow(plugin: PluginSection) -> bool:
    """Whether further ranks would find a place: ``nproc`` and one of the sizes are left open."""
    return plugin.name != "single" and plugin.nproc is None and _open_size(plugin) is not None


def _given(plugin: PluginSection) -> dict[str, int]:
    values = {"dp_size": plugin.dp_size, "tp_size": plugin.tp_size, "pp_size": plugin.pp_size}
    return {key: value for key, value in values.items() if value is not None}


def _open_size(plugin: PluginSection) -> str | None:
    """The size that takes the ranks which the others leave, or None where all are given."""
    given = _given(plugin)
    return next((key for key in ("tp_size", "pp_size", "dp_size") if key not in given), None)


def _way_out(fitting: Sequence[int], joined: bool) -> str:
    ranks = or_list(str(many) for many in fitting if many)
    if joined:
        return f"start {ranks} ranks by torchrun"
    return f"give plugin.nproc={ranks}, or leave it out"


def _product(given: dict[str, int]) -> str:
    factors = {key: size for key, size in given.items() if size > 1} or given
    text = " x ".join(f"{key} {size}" for key, size in factors.items())
    return text if len(factors) == 1 else f"{text} = {prod(factors.values())}"
