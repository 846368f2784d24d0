"""Skip an optimizer step whose loss or gradient norm is a spike, without the host's waiting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.transfer import Number
from runner.config.clip_section import skip_options


class Past(NamedTuple):
    """What a rule remembers, as tensors on one device, which are replaced and never written to.

    ``kept`` are of ``sigma`` the values of the last kept steps [values, window], the newest last,
    NaN where there is none; of ``ema`` their moving average from an average of 0 [values, 1].
    """

    kept: Tensor
    steps: Tensor  # number of kept steps, of sigma at most the window
    missed: Tensor  # those of the last steps, skipped in a row [values, accept_after]; else NaN

    def or_if(self, condition: Tensor, other: Past) -> Past:
        """Return ``other`` where the condition holds, else this."""
        return Past(*(torch.where(condition, b, a) for a, b in zip(self, other, strict=True)))


class SkipRule:
    """Decides which steps are skipped as spikes; its options are those of section ``clip.skip``.

    History holds the values of kept steps alone. A step whose gradient is not finite is no spike,
    and neither enters the history nor ends a row of skips. A loss that is not finite although the
    gradient is counts as a spike once the rule acts, and never as a new level.

    ``sigma`` limits a value to the mean of kept ones plus k standard deviations (with Bessel's
    correction, as in OLMo-core), ``ema`` to k times their moving average, corrected for its start
    at 0 as Adam's moments are. Where that average is not above 0 (a negative loss), no multiple of
    it is a limit, and nothing is skipped.

    Example:
        >>> rule = SkipRule("sigma", k=4.0)
        >>> decision = apply_gradient_clipping(model, "norm", 1.0)
        >>> if not rule.is_spike(decision.norm):
        ...     optimizer.step()
    """

    def __init__(
        self,
        rule: Literal["sigma", "ema"] = "sigma",
        of: Literal["norm", "loss", "either"] = "norm",
        **options: Any,
    ) -> None:
        chosen = skip_options(rule=rule, of=of, **options)
        self.rule, self.of, self.accept_after = rule, of, chosen.accept_after
        self.window, self.decay = chosen.window, chosen.decay
        self.k, self.min_steps = chosen.k or 0.0, chosen.min_steps or 1
        self._past: Past | None = None
        self._loaded: Mapping[str, Any] | None = None

    @property
    def of_what(self) -> str:
        """The value that the rule judges, for messages."""
        names = {"norm": "norm of the gradient", "loss": "loss"}
        return names.get(self.of, "loss or the norm of the gradient")

    @property
    def reads_loss(self) -> bool:
        """Whether the rule needs the loss of a step."""
        return self.of != "norm"

    @torch.no_grad()
    def is_spike(
        self, norm: Number, loss: Number | None = None, finite: bool | Tensor | None = None
    ) -> bool | Tensor:
        """Decide whether a step is skipped, and note its values.

        The host does not wait for an accelerator. Ranks that give the same bits decide alike.

        Args:
            norm: norm of the gradient before clipping.
            loss: loss of the step, for a rule that reads it.
            finite: whether the gradient is finite; by default, whether ``norm`` is.

        Returns:
            A bool where ``norm`` is a float, else a 0-dimensional boolean tensor.

        Raises:
            ValueError: the rule reads the loss, and none is given.
        """
        if self.reads_loss and loss is None:
            raise ValueError(f"a skip rule of {self.of} reads the loss of each step: give it")
        device = norm.device if isinstance(norm, Tensor) else torch.device("cpu")
        vector = transfer.on_device([norm] if loss is None else [norm, loss], device)
        known = vector[0].isfinite() if finite is None else finite
        values = {"norm": vector[:1], "loss": vector[1:], "either": vector}[self.of]
        past = self._begin(values) if self._past is None else self._past
        above = ~(values <= self._limits(past))  # also where a value is NaN
        spike = (past.steps >= self.min_steps) & above.any() & known
        usable = values.isfinite().all() & known
        past = past.or_if(usable & ~spike, self._longer(past, values[:, None]))
        if self.accept_after is not None:
            missed = _last(torch.cat([past.missed, values[:, None]], 1), self.accept_after)
            past = past.or_if(usable & spike, past._replace(missed=missed))
            # So many skips in a row are the new level, whose history is theirs.
            anew = self._longer(self._empty(values), past.missed)
            past = past.or_if(past.missed[0, 0].isfinite(), anew)
        self._past = past
        return spike if isinstance(norm, Tensor) else bool(spike)

    def state_dict(self) -> dict[str, Any]:
        """Return the history, for a rule of the same kind; an accelerator is waited for."""
        history = self._loaded
        if self._past is not None:
            history = {name: value.cpu() for name, value in self._past._asdict().items()}
        return {"rule": self.rule, "of": self.of, "history": history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; anew after another ``rule`` or ``of``."""
        self._past = None
        same = (state["rule"], state["of"]) == (self.rule, self.of)
        self._loaded = state["history"] if same else None

    def _empty(self, values: Tensor) -> Past:
        start = math.nan if self.rule == "sigma" else 0.0
        kept = values.new_full((len(values), self.window or 1), start)
        missed = values.new_full((len(values), self.accept_after or 0), math.nan)
        return Past(kept, values.new_zeros(()), missed)

    def _begin(self, values: Tensor) -> Past:
        """Return the history before a first step, whose options may have been others."""
        empty = self._empty(values)
        if self._loaded is None:
            return empty
        kept, steps, missed = (self._loaded[name].to(values) for name in Past._fields)
        size, most = empty.kept.shape[1], empty.missed.shape[1]
        # The next skip may be the one that is accepted.
        missed = _last(missed, min(missed.shape[1], max(0, most - 1)))
        return Past(
            _last(torch.cat([empty.kept, kept], 1), size),
            steps.clamp(max=size) if self.rule == "sigma" else steps,
            _last(torch.cat([empty.missed, missed], 1), most),
        )

    def _limits(self, past: Past) -> Tensor:
        """Return the largest value [values] that is no spike."""
        kept, count, _ = past
        if self.rule == "ema":
            mean = kept[:, 0] / (1.0 - torch.pow(self.decay or 0.0, count))
            return torch.where(mean > 0, mean * self.k, torch.inf)
        # From the newest value, so that the mean of equal values is exact.
        newest = kept[:, -1:]
        away = kept - newest
        mean = away.nansum(1, keepdim=True) / count
        squares = (away - mean).square().nansum(1, keepdim=True)
        return (newest + mean + self.k * (squares / (count - 1.0)).sqrt())[:, 0]

    def _longer(self, past: Past, values: Tensor) -> Past:
        """Return the history with further kept steps [values, steps], which end a row of skips."""
        kept, count = past.kept, past.steps + float(values.shape[1])
        if self.rule == "sigma":
            size = kept.shape[1]
            kept, count = _last(torch.cat([kept, values], 1), size), count.clamp(max=size)
        else:
            decay, steps = self.decay or 0.0, values.shape[1]
            age = torch.arange(steps, 0, -1, device=kept.device, dtype=kept.dtype) - 1.0
            new = (values * ((1.0 - decay) * torch.pow(decay, age))).sum(1, keepdim=True)
            kept = decay**steps * kept + new
        return Past(kept, count, torch.full_like(past.missed, math.nan))


def _last(rows: Tensor, count: int) -> Tensor:
    """Return a copy of the last ``count`` values of each row."""
    return rows[:, rows.shape[1] - count :].clone()
