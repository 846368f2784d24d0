"""Compare anyone's clipping with float64 arithmetic on the gradients before it."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from runner.check import (
    element_faults,
    gradient_faults,
    norm_faults,
    scale_faults,
    step_order,
)
from runner.check.clipped import Clipped, Mode, applied
from runner.check.measures import Change, Measure, Uniform, keep
from runner.check.mistakes import Explainer
from runner.check.packs import Pack
from runner.check.parts import facts_of, inner_model, parts_of
from runner.check.ranks import MissingRanksError, Ranks, Watch, in_words
from runner.check.reference import coefficients, near
from runner.check.whole import Whole, names_missing
from runner.clip.boosted import is_boosted
from runner.config.notation import first_few
from runner.gradients.shard import is_dtensor
from runner.gradients.units import head_weights


class ClippingError(RuntimeError):
    """The clipping that was checked is wrong; the message is the report."""


class RankReport(NamedTuple):
    """What a rank brings to a report."""

    returned: float | None
    logged: float | None
    order: list[str]  # what is wrong with the order of its calls


class ClippingCheck:
    """A context manager that checks the clipping inside of it, on every rank.

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
    Entering, leaving and :meth:`report` are collectives of all ranks, in a process
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

    Attributes:
        norm: the true norm before clipping, the same on every rank, once the block was entered.
        faults: sentences that name what is wrong, most important first, once reported.
        notes: sentences on what is not wrong, but worth knowing.

    Raises:
        TypeError: the model is no module, or is wrapped by FSDP 1.
        ValueError: a wrong threshold, mode or group, or the model was boosted.
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
        if groups and not self._ranks.started:
            raise ValueError("groups needs torch.distributed: call init_process_group first")
        self._parts, self._problems = parts_of(self.inner, groups)
        names = [part.name for part in self._parts]
        self._unmatched = [glob for glob in groups or {} if not fnmatch.filter(names, glob)]
        self._order: list[str] = []
        self._whole: Whole | None = None
        self._changes: list[list[Change]] = []
        self._packs: list[Pack] = []

    def __enter__(self) -> ClippingCheck:
        self._order = step_order.entered(self._parts)
        self._packs = keep(self._parts, self.p, self.on_host)
        facts = facts_of(self._parts, self._ranks.size)
        ranks = self._ranks.gather((facts, self._problems, self._unmatched))
        self._require_groups([row[1] for row in ranks], [row[2] for row in ranks])
        self._whole = Whole([row[0] for row in ranks])
        self.norm = self._whole.norm(self.p)
        self._watch.start()
        return self

    def _require_groups(self, problems: list[list[str]], unmatched: list[list[str]]) -> None:
        """Refuse groups of which a rank is no member, or that match nothing, on every rank."""
        for rank, texts in enumerate(problems):
            if texts:
                raise ValueError(f"groups: {texts[0]} (rank {rank})")
        for glob in unmatched[0]:
            if all(glob in globs for globs in unmatched):
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
        self._watch.state = "has left the clipping"
        measure = Measure(
            rank=self._ranks.rank,
            mode=self.mode,
            max_norm=self.max_norm,
            p=self.p,
            eps=self.eps,
            excluded=self._excluded(),
        )
        for part in self._parts:
            part.after = part.gradient
        uniform = self._uniform(measure)
        step_order.left(self._parts, math.isfinite(self.norm))
        try:
            of_ranks = self._ranks.gather(uniform, self._watch.left())
        except MissingRanksError as missing:
            raise ClippingError(self._hung()) from missing
        self._watch.stop()
        self._packs = []
        if self._agree(of_ranks):
            self._changes = [uniform.as_changes(rank) for rank, uniform in enumerate(of_ranks)]
        else:
            self._changes = self._ranks.gather(measure.changes(self._parts))

    def _uniform(self, measure: Measure) -> Uniform | None:
        """Return what was done to all gradients of this rank, None if details are needed."""
        assert self._whole is not None
        if self.mode == "adaptive" or self._whole.unequal or not math.isfinite(self.norm):
            return None
        return measure.uniform(self._parts, self._packs)

    def _agree(self, of_ranks: list[Uniform | None]) -> TypeGuard[list[Uniform]]:
        """Return whether every rank did the same one thing to all of its gradients."""
        assert self._whole is not None
        coefficients_of_ranks: list[float] = []
        for uniform in of_ranks:
            if uniform is None:
                return False
            if not math.isnan(uniform.coefficient):
                coefficients_of_ranks.append(uniform.coefficient)
        if not coefficients_of_ranks:
            return True
        low = min(coefficients_of_ranks)
        high = max(coefficients_of_ranks)
        return near(low, high, self._whole.tolerance)

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
        report = RankReport(number_of(norm), number_of(logged), self._order)
        reports: list[RankReport] = self._ranks.gather(report)
        clipped = Clipped(
            whole=self._whole,
            changes=self._changes,
            returned=[report.returned for report in reports],
            logged=[report.logged for report in reports],
            mode=self.mode,
            max_norm=self.max_norm,
            p=self.p,
        )
        self.faults = [*gradient_faults.before_clipping(self._whole)]
        for report in reports:
            self.faults += [text for text in report.order if text not in self.faults]
        self.notes = [
            f"{second} is tied to {first}: they count once" for first, second in self._whole.tied
        ]
        self._judge(clipped)
        return self._text(clipped)

    def _judge(self, clipped: Clipped) -> None:
        """Add what is wrong with the norms and the coefficients, the same on every rank."""
        whole = clipped.whole
        if not any(fact.has_gradient for facts in whole.ranks for fact in facts):
            return
        if not math.isfinite(self.norm):
            self.faults += gradient_faults.of_nonfinite_step(clipped)
            self.notes.append(gradient_faults.where_not_finite(whole))
            return
        if self.mode != "norm":
            self._add(element_faults.of_elements(clipped))
        elif whole.unequal:
            self._add(scale_faults.of_unequal_ranks(clipped))
        if not whole.unequal:
            self._judge_norms(clipped)

    def _judge_norms(self, clipped: Clipped) -> None:
        """Compare norms and coefficients with the true norm."""
        explainer = Explainer(clipped.whole, self.p, self._parts, self.inner, self._ranks)
        right = [self.norm]
        rounded = norm_faults.norm_in_the_type_of_the_gradients(clipped, self._parts, self._ranks)
        if rounded is not None:
            right.append(rounded)
            self._note(norm_faults.rounding_note(clipped, rounded))
        fault = norm_faults.of_returned(clipped, right, explainer)
        self._add(fault)
        if fault is None:
            self._note(norm_faults.bfloat16_note(clipped))
        is_wrong = fault is not None
        self.faults += norm_faults.of_logged(clipped, right, explainer, is_wrong)
        if self.mode == "norm":
            self.faults += scale_faults.of_coefficients(clipped, right, explainer, is_wrong)

    def _add(self, fault: str | None) -> None:
        if fault is not None:
            self.faults.append(fault)

    def _note(self, note: str | None) -> None:
        if note is not None:
            self.notes.append(note)

    def _text(self, clipped: Clipped) -> str:
        """Return the report."""
        whole = clipped.whole
        lines = [headline("check_clipping", self.faults)]
        lines += [f"  {number}. {text}" for number, text in enumerate(self.faults, 1)]
        ranks = "1 rank" if whole.size == 1 else f"{whole.size} ranks"
        lines.append(
            f"  true norm {self.norm:.6g} (p={self.p:g}, float64, {len(whole.units)} parts on "
            f"{ranks})"
        )
        returned = sorted({norm for norm in clipped.returned if norm is not None})
        if returned:
            lines.append(f"  returned {first_few([f'{norm:.6g}' for norm in returned])}")
        if self.mode == "norm" and math.isfinite(self.norm):
            _, right = coefficients(self.norm, self.max_norm)
            lines.append(f"  right coefficient {right:.6g}; applied {applied(clipped.all_changes)}")
        lines += [f"  note: {text}" for text in self.notes]
        return "\n".join(lines)


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


def headline(name: str, faults: Sequence[str]) -> str:
    """Return the first line of a report."""
    if not faults:
        return f"{name}: right"
    return f"{name}: {len(faults)} fault{'' if len(faults) == 1 else 's'}"


check_clipping = ClippingCheck
