"""Compare anyone's clipping with float64 arithmetic on the gradients before it."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from runner.check import norm_faults, scale_faults, step_order
from runner.check.measures import Change, keep, measure, power_of_buffers
from runner.check.parts import (
    Facts,
    Whole,
    facts_of,
    inner_model,
    names_missing,
    parts_of,
)
from runner.check.ranks import MissingRanksError, Ranks, Watch, in_words
from runner.check.reference import coefficients, combined, power_sum, root
from runner.clip.functional import is_boosted
from runner.config.notation import first_few
from runner.gradients.shard import is_dtensor, local
from runner.gradients.units import head_weights

Mode = Literal["norm", "value", "adaptive"]

_TOLERANCE = {
    "torch.float64": 1e-6,
    "torch.float32": 1e-5,
    "torch.float16": 1e-3,
    "torch.bfloat16": 2.0**-7,
}
"""Relative error of a norm that the type of the gradients explains."""
_PER_ELEMENT = 2e-11  # what a float32 sum loses for each element of a tensor
_SUSPECT = 0.03  # errors up to which torch's own rounding is computed: it may explain them
_LOGGED = 1e-3  # logs round


class ClippingError(RuntimeError):
    """The clipping that was checked is wrong; the message is the report."""


class Said(NamedTuple):
    """What a rank says in a report."""

    returned: float | None
    logged: float | None
    order: tuple[str, ...] = ()


def check_clipping(
    model: nn.Module,
    max_norm: float,
    *,
    mode: Mode = "norm",
    norm_type: float = 2.0,
    groups: Mapping[str, Any] | None = None,
    exclude: Sequence[str] | None = None,
    eps: float = 1e-3,
    on_host: bool = False,
    timeout: float = 300.0,
) -> ClippingCheck:
    """Return a context manager that checks the clipping inside of it, on every rank.

    It keeps the gradients before and compares after: the norm of the whole model in float64, over
    DTensor placements and ``groups``, with the norm that was returned and the value that is
    logged; the coefficient that each rank applied to each parameter with min(1, λ/‖G‖); replicas
    with each other. It works in any loop: DDP, ``fully_shard`` (HSDP, 2-D meshes, plain parameters
    beside), tensor-parallel DTensors, experts and pipeline stages of your own.

    Example::

        with runner.check_clipping(model, max_norm=1.0) as check:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        print(check.report(norm, logged=value))  # on rank 0
        check.strict(norm)  # raises ClippingError on every rank

    Gradients are averaged over ranks and unscaled before the block, and stepped after it. It takes
    memory for one copy of this rank's gradients until the report, and changes nothing of the run.
    Entering, leaving and :meth:`ClippingCheck.report` are collectives of all ranks, in a process
    group of their own: a rank that waits inside for others is found by the time-out, and named.

    Args:
        model: the module that is trained, wrapped or not; several of a rank as ``nn.ModuleList``.
        max_norm: threshold λ of the mode, above 0; ``math.inf`` where only the norm is taken.
        mode: ``norm``, ``value`` (each element in [-λ, λ]) or ``adaptive`` (by units, Brock et al.
            2021, section 4).
        norm_type: p of the total norm; ``math.inf`` for the largest element.
        groups: for globs of parameter names the process group (or device mesh of one dimension)
            over which they are distinct, as in :func:`runner.apply_gradient_clipping`:
            ``{"experts.*": group}``.
        exclude: with ``adaptive``, globs of parameters that are not clipped. None: the weight of
            the model's head may be clipped or not.
        eps: ε of ``adaptive``, the least norm of a unit's weights.
        on_host: keep the copy in the memory of the host.
        timeout: seconds after which a rank that has not left the block is reported.

    Raises:
        TypeError: the model is no module, or is wrapped by FSDP 1.
        ValueError: a wrong threshold, mode or group, or the model was boosted.
    """
    return ClippingCheck(
        model,
        max_norm,
        mode=mode,
        norm_type=norm_type,
        groups=groups,
        exclude=exclude,
        eps=eps,
        on_host=on_host,
        timeout=timeout,
    )


class ClippingCheck:
    """What :func:`check_clipping` returns.

    Attributes:
        norm: the true norm before clipping, the same on every rank, once the block was entered.
        faults: sentences that name what is wrong, most important first, once reported.
        notes: sentences on what is not wrong, but worth knowing.
    """

    def __init__(
        self,
        model: nn.Module,
        max_norm: float,
        *,
        mode: Mode = "norm",
        norm_type: float = 2.0,
        groups: Mapping[str, Any] | None = None,
        exclude: Sequence[str] | None = None,
        eps: float = 1e-3,
        on_host: bool = False,
        timeout: float = 300.0,
    ) -> None:
        if mode not in ("norm", "value", "adaptive"):
            raise ValueError(f"mode is {mode!r}: norm, value or adaptive")
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm!r}: a threshold above 0")
        if not norm_type >= 0:
            raise ValueError(f"norm_type is {norm_type!r}: 0 or more")
        if isinstance(model, nn.Module) and is_boosted(model):
            raise ValueError(
                "this model was boosted: its optimizer synchronises gradients as it clips them. "
                "`python -m runner verify` compares a plugin with one process"
            )
        self.inner = inner_model(model)
        self.max_norm = float(max_norm)
        self.mode = mode
        self.p = float(norm_type)
        self.exclude = exclude
        self.eps = eps
        self.on_host = on_host
        self.norm = math.nan
        self.faults: list[str] = []
        self.notes: list[str] = []
        self._ranks = Ranks(timeout)
        self._watch = Watch(self._ranks)
        self._parts, problems = parts_of(self.inner, groups)
        if groups and not self._ranks.started:
            raise ValueError("groups needs torch.distributed: call init_process_group first")
        unmatched = [
            glob
            for glob in groups or {}
            if not any(fnmatch.fnmatchcase(part.name, glob) for part in self._parts)
        ]
        self._problems = problems
        self._unmatched = unmatched
        self._order: list[str] = []
        self._whole: Whole | None = None
        self._changes: list[list[Change]] = []

    def __enter__(self) -> ClippingCheck:
        self._order = step_order.entered(self._parts)
        keep(self._parts, self.p, self.on_host)
        facts = facts_of(self._parts)
        said = self._ranks.gather((facts, self._problems, self._unmatched))
        self._require_groups(said)
        self._whole = Whole([rank[0] for rank in said])
        self.norm = self._whole.norm(self.p)
        self._watch.start()
        return self

    def _require_groups(self, said: list[Any]) -> None:
        """Refuse groups of which a rank is no member, or that match nothing, on every rank."""
        for rank, (_, problems, _) in enumerate(said):
            if problems:
                raise ValueError(f"groups: {problems[0]} (rank {rank})")
        for glob in said[0][2]:
            if all(glob in unmatched for _, _, unmatched in said):
                raise ValueError(f"groups: {glob!r} matches no parameter on any rank")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._watch.state = f"raised {type(error).__name__}: {error}"
            if self._watch.places:
                raise ClippingError(self._hung()) from error
            return
        assert self._whole is not None
        self._watch.state = "has left the clipping"
        excluded = self._excluded()
        changes = measure(self._parts, self, excluded)
        step_order.left(self._parts, math.isfinite(self.norm))
        try:
            self._changes = self._ranks.gather(changes, self._watch.left())
        except MissingRanksError as missing:
            raise ClippingError(self._hung()) from missing
        self._watch.stop()

    def _excluded(self) -> dict[str, str]:
        """Return what adaptive clipping does to parameters: ``never``, ``maybe``; else clipped."""
        if self.mode != "adaptive":
            return {}
        if self.exclude is None:
            return dict.fromkeys(head_weights(self.inner), "maybe")
        return {
            part.name: "never"
            for part in self._parts
            if any(fnmatch.fnmatchcase(part.name, glob) for glob in self.exclude)
        }

    def _hung(self) -> str:
        places = self._watch.places or {self._ranks.rank: self._watch.state}
        return (
            "the clipping hangs: ranks do not call the same collectives: "
            f"{in_words(places)}{self._without_gradients()}"
        )

    def _without_gradients(self) -> str:
        assert self._whole is not None
        texts = [
            f"rank {rank} has no gradient of {first_few(names)}"
            for rank, names in names_missing(self._whole.ranks)
        ]
        return f"; {'; '.join(texts)}" if texts else ""

    def report(self, norm: Any = None, *, logged: Any = None) -> str:
        """Compare, and return the report on rank 0 (an empty text elsewhere); a collective.

        Args:
            norm: what the clipping returned on this rank: a number, a tensor, or a Decision.
            logged: the value that goes to the log, on the ranks that log; None on others.
        """
        text = self._report(norm, logged)
        return text if self._ranks.rank == 0 else ""

    def strict(self, norm: Any = None, *, logged: Any = None) -> None:
        """Raise a :class:`ClippingError` on every rank if anything is wrong; a collective."""
        text = self._report(norm, logged)
        if self.faults:
            raise ClippingError(text)

    def _report(self, norm: Any, logged: Any) -> str:
        if self._whole is None or not self._changes:
            raise ValueError("the block of check_clipping was not run: report after it")
        said = self._ranks.gather(Said(number_of(norm), number_of(logged), tuple(self._order)))
        self.faults = []
        self.notes = []
        self._find(said)
        return self._text(said)

    def _find(self, said: list[Said]) -> None:
        """Fill ``faults`` and ``notes``, the same on every rank."""
        whole = self._whole
        assert whole is not None
        self.faults += scale_faults.before(whole)
        for sentence in dict.fromkeys(text for one in said for text in one.order):
            self.faults.append(sentence)
        for first, second in whole.tied:
            self.notes.append(f"{second} is tied to {first}: they count once")
        facts = [fact for rank in whole.ranks for fact in rank]
        if not any(fact.has_gradient for fact in facts):
            return
        if not math.isfinite(self.norm):
            self.faults += scale_faults.not_finite(whole, said, self._changes)
            self.notes.append(scale_faults.where_not_finite(whole))
            return
        returned = [one.returned for one in said]
        tolerance = tolerance_of(facts)
        explain = self._explainer(tolerance)
        if self.mode != "norm":
            self.faults += scale_faults.by_elements(whole, self._changes, self.mode, self.max_norm)
        if whole.unequal:
            if self.mode == "norm":
                self.faults += scale_faults.ranks_differ(whole, self._changes)
            return
        norms = self._right_norms(said, tolerance)
        norm_is_wrong = self._check_returned(returned, norms, tolerance, explain)
        self._check_logged(said, norms, tolerance, explain, norm_is_wrong)
        if self.mode == "norm":
            known = [self.norm if value is None else value for value in returned]
            self.faults += scale_faults.by_coefficient(
                whole,
                self._changes,
                returned=known if norm_is_wrong else None,
                norms=norms,
                max_norm=self.max_norm,
                p=self.p,
                tolerance=tolerance,
                explain=explain,
            )

    def _right_norms(self, said: list[Said], tolerance: float) -> list[float]:
        """Return the true norm, and what torch's own rounding makes of it where this matters.

        On a CPU torch adds float32 one after another: a tensor of a million equal elements is off
        by 4e-4.
        """
        assert self._whole is not None
        values = [
            value for one in said for value in (one.returned, one.logged) if value is not None
        ]
        if self.mode == "norm":
            values += [
                self.max_norm / change.coefficient
                for row in self._changes
                for change in row
                if 0 < change.coefficient < 1
            ]
        off = [abs(value - self.norm) / self.norm for value in values] if self.norm else []
        if not any(tolerance < error < _SUSPECT for error in off):
            return [self.norm]
        here = [
            0.0
            if part.before is None
            else float(torch.linalg.vector_norm(part.before, self.p)) ** self._exponent
            for part in self._parts
        ]
        ranks = self._ranks.gather(here)
        powers = [ranks[rank][at] for rank, at in self._places()]
        rounded = root(combined(powers, self.p), self.p)
        if not _near(rounded, self.norm, tolerance) and math.isfinite(rounded):
            self.notes.append(
                f"torch's own sum in the type of the gradients is off by "
                f"{abs(rounded / self.norm - 1):.2g}: {rounded:.6g} counts as right too"
            )
        return [self.norm, rounded]

    @property
    def _exponent(self) -> float:
        return 1.0 if math.isinf(self.p) or self.p == 0 else self.p

    def _places(self) -> list[tuple[int, int]]:
        """Return for each unit its first rank, and its position among the parts of this rank."""
        assert self._whole is not None
        places: list[tuple[int, int]] = []
        for unit in self._whole.units:
            rank = next(iter(unit.holders))
            held = unit.holders[rank]
            facts = self._whole.ranks[rank]
            places.append((rank, next(i for i, fact in enumerate(facts) if fact is held)))
        return places

    def _explainer(self, tolerance: float) -> norm_faults.Finder:
        """Return a function that names the mistake behind norms of ranks; it is a collective."""
        known: list[Any] = []

        def explain(
            values: Sequence[float | None], rounded: float, factors: bool = True
        ) -> str | None:
            assert self._whole is not None
            if not known:
                known.append(self._sums())
            sums, others, instead, extra = known[0]
            guesses = norm_faults.mistakes(sums, others, instead, extra, factors)
            limit = max(tolerance, rounded, 1e-6)
            return norm_faults.matching(guesses, values, self.norm, limit)

        return explain

    def _sums(self) -> Any:
        """Return sums of powers for this p and for others, after clipping, and of strangers."""
        whole = self._whole
        assert whole is not None
        powers = [p for p in (1.0, 2.0, math.inf) if p != self.p]
        rows = []
        for part in self._parts:
            kept = part.before
            rows.append([0.0 if kept is None else float(power_sum(kept, p)) for p in powers])
        buffers = power_of_buffers(self.inner, self.p)
        after = [
            0.0 if part.after is None else float(power_sum(part.after, self.p))
            for part in self._parts
        ]
        weights = [float(power_sum(local(part.parameter.detach()), self.p)) for part in self._parts]
        ranks = self._ranks.gather((rows, after, buffers, weights))
        places = self._places()
        here = norm_faults.Sums(whole, self.p, {i: u.power for i, u in enumerate(whole.units)})
        others = []
        for column, p in enumerate(powers):
            values = {i: ranks[rank][0][at][column] for i, (rank, at) in enumerate(places)}
            others.append(norm_faults.Sums(whole, p, values))
        instead: dict[str, list[float]] = {}
        for column, label in (
            (1, "this is the norm after clipping, not before"),
            (3, "this is the norm of the weights, not of the gradients"),
        ):
            values = {i: ranks[rank][column][at] for i, (rank, at) in enumerate(places)}
            instead[label] = [norm_faults.Sums(whole, self.p, values).norm] * whole.size
        extra = {
            "the norm counts buffers of the model": [rank[2] for rank in ranks],
        }
        if whole.untrained:
            names = first_few([unit.name for unit in whole.untrained if unit.power])
            total = math.fsum(unit.power for unit in whole.untrained)
            extra[f"frozen parameters counted: {names}"] = [total] * whole.size
        return here, others, instead, extra

    def _check_returned(
        self,
        returned: list[float | None],
        norms: Sequence[float],
        tolerance: float,
        explain: norm_faults.Finder,
    ) -> bool:
        """Compare the norms that ranks returned; return whether any is wrong."""
        wrong = [
            rank
            for rank, value in enumerate(returned)
            if value is not None and not _near_any(value, norms, tolerance)
        ]
        if not wrong:
            self._note_rounding(returned)
            return False
        rank = wrong[0]
        value = returned[rank]
        assert value is not None
        why = explain(returned, tolerance, True)
        if why is None and norm_faults.in_bfloat16(returned):
            why = "it was computed in bfloat16"
        different = len({one for one in returned if one is not None}) > 1
        if why is None and different:
            values = ", ".join(
                f"{one:.6g} on rank {rank}" for rank, one in enumerate(returned) if one is not None
            )
            why = f"ranks returned different norms: {values}"
        self.faults.append(self._off(value, f"rank {rank} returned", why))
        return True

    def _note_rounding(self, returned: list[float | None]) -> None:
        known = [value for value in returned if value is not None]
        if known and norm_faults.in_bfloat16(known):
            worst = max(abs(value - self.norm) for value in known) / (self.norm or 1.0)
            if worst > 1e-4:
                self.notes.append(
                    f"the norm is rounded to bfloat16, the type of the gradients: off by "
                    f"{worst:.2g}"
                )

    def _check_logged(
        self,
        said: list[Said],
        norms: Sequence[float],
        tolerance: float,
        explain: norm_faults.Finder,
        norm_is_wrong: bool,
    ) -> None:
        tolerance = max(tolerance, _LOGGED)
        for rank, one in enumerate(said):
            value = one.logged
            if value is None or _near_any(value, norms, tolerance):
                continue
            returned = one.returned
            if norm_is_wrong and returned is not None and _near(value, returned, tolerance):
                continue
            alone: list[float | None] = [None] * len(said)
            alone[rank] = value
            why = explain(alone, _LOGGED, True)
            self.faults.append(self._off(value, f"rank {rank} logs", why, "the logged value is "))

    def _off(self, value: float, who: str, why: str | None, prefix: str = "") -> str:
        share = value / self.norm if self.norm else math.inf
        text = f"{prefix}{share:.4g} of the true norm"
        text += f": {why}" if why else ": no known mistake gives this number"
        return f"{text} ({who} {value:.6g}, the true norm is {self.norm:.6g})"

    def _text(self, said: list[Said]) -> str:
        """Return the report."""
        whole = self._whole
        assert whole is not None
        count = len(self.faults)
        if count:
            lines = [f"check_clipping: {count} fault{'' if count == 1 else 's'}"]
            lines += [f"  {number}. {text}" for number, text in enumerate(self.faults, 1)]
        else:
            lines = ["check_clipping: right"]
        ranks = "1 rank" if whole.size == 1 else f"{whole.size} ranks"
        lines.append(
            f"  true norm {self.norm:.6g} (p={self.p:g}, float64, {len(whole.units)} parts on "
            f"{ranks})"
        )
        returned = sorted({one.returned for one in said if one.returned is not None})
        if returned:
            lines.append(f"  returned {first_few([f'{value:.6g}' for value in returned])}")
        if self.mode == "norm" and math.isfinite(self.norm):
            _, high = coefficients(self.norm, self.max_norm)
            lines.append(
                f"  right coefficient {high:.6g}; applied {scale_faults.applied(self._changes)}"
            )
        lines += [f"  note: {text}" for text in self.notes]
        return "\n".join(lines)


def tolerance_of(facts: Sequence[Facts]) -> float:
    """Return the relative error of a norm that types and sizes of the gradients explain."""
    held = [fact for fact in facts if fact.has_gradient]
    kinds = {fact.dtype for fact in held}
    tolerance = max((_TOLERANCE.get(kind, 1e-5) for kind in kinds), default=1e-5)
    if kinds != {"torch.float64"}:
        tolerance += _PER_ELEMENT * max((fact.largest for fact in held), default=0)
    return tolerance


def number_of(value: Any) -> float | None:
    """Return a norm as a number: of a DTensor the whole one, which is a collective."""
    if value is None:
        return None
    if hasattr(value, "norm_clipped") and hasattr(value, "norm"):
        value = value.norm  # a Decision
    if isinstance(value, Tensor):
        if is_dtensor(value):
            value = value.full_tensor()
        return float(value.detach())
    return float(value)


def _near(first: float, second: float, tolerance: float) -> bool:
    if first == second:
        return True
    if not (math.isfinite(first) and math.isfinite(second)):
        return False
    return abs(first - second) <= tolerance * max(abs(first), abs(second))


def _near_any(value: float, others: Sequence[float], tolerance: float) -> bool:
    return any(_near(value, other, tolerance) for other in others)
