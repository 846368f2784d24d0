"""Find what the mean of a loss divides by, before the first step.

One forward pass of a sample shows which loss of torch the loss is. Where it is none, it is
measured on two unequal parts of a batch and on the whole: a mean over n items of the parts is that
of the whole, (n_1 L_1 + n_2 L_2) ÷ (n_1 + n_2) = L. The losses of one sample, of the parts and of
the whole cost no more than two forward passes of the batch.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from runner.booster.batch import batch_size, mapped, named_parts, target_name, targets_of
from runner.booster.divisor import (
    COUNTED,
    LABELS,
    NOTHING,
    SAMPLES,
    Divisor,
    LossCalls,
    is_finite,
)
from runner.booster.loss import DivisorError, WindowLoss, logits_of, returned_loss
from runner.parallel.collectives import from_all
from runner.parallel.hooks import held_tensors
from runner.parallel.pipeline import Pipeline

_logger = logging.getLogger(__name__)

_WAY_OUT = (
    'give it a method loss_items({}) that returns what its mean divides by, or reduction="sum", or '
    "set loss.items=samples, labels or none (the plain mean over microbatches, as in other "
    "trainers), which is Trainer(criterion=Loss(items=...)) in a script"
)
_UNMEASURED = (
    "what the mean of %s divides by was not measured, because %s: it is taken for the mean over "
    "%s; loss.items=samples, labels or none states it"
)
_RANDOM = "it is random"
_OF_THE_BATCH = (
    "it depends on the batch as a whole, as a contrastive loss does, so that accumulated "
    "microbatches are not one batch"
)


class Finding(NamedTuple):
    """What a rank knows of the loss after a part of the measurement.

    Attributes:
        done: whether nothing is left to measure.
        divisor: what the mean divides by; None if it is the guess of the WindowLoss.
        problem: why the loss is refused; empty if it is not.
        reason: why the loss was not measured; empty if it was.
        samples: samples of the batch that can be measured in parts; 0 for none.
    """

    done: bool = False
    divisor: Divisor | None = None
    problem: str = ""
    reason: str = ""
    samples: int = 0
    retry: bool = False


@dataclass
class _Model:
    """How the model of a loss is run without leaving a trace."""

    module: nn.Module
    pipeline: Pipeline | None
    loss: WindowLoss

    def modules(self) -> Iterator[nn.Module]:
        yield from self.module.modules()
        stages = () if self.pipeline is None else self.pipeline.stages.values()
        for stage in stages:
            yield from stage.modules()

    def outputs(self, batch: Any, training: bool = False) -> Any:
        for module in self.modules():
            module.training = training
        if self.pipeline is not None:
            return self.pipeline.evaluate(self.loss.call(batch).only_tensor())
        args, kwargs = self.loss.call(batch)
        return self.module(*args, **kwargs)


def settle(
    loss: WindowLoss,
    module: nn.Module,
    batches: Iterable[Any],
    pipeline: Pipeline | None = None,
    together: bool = False,
) -> None:
    """Find what the mean of ``loss`` divides by, and let it count that from now on.

    Args:
        loss: the loss; nothing happens if its divisor is known.
        module: the model on this rank, boosted or not.
        batches: microbatches on the device of the model; the first ones are measured.
        pipeline: stages of the model, if it is cut into some.
        together: whether other ranks call this too, with their batches of the same model.

    Raises:
        DivisorError: the mean is over something else than the items, on every rank.
    """
    if not loss.unproved or (pipeline is not None and loss.may_return):
        loss.unproved = False
        return
    batch = _joined(batches)
    if loss.may_return and not loss.reads_batch(batch):
        loss.unproved = False
        return
    model = _Model(module, pipeline, loss)
    from_ranks: Callable[[Finding], list[Finding]] = from_all if together else lambda mine: [mine]
    device = next((tensor.device for tensor in held_tensors(batch)), torch.device("cpu"))
    of_criterion = loss.criterion.modules() if isinstance(loss.criterion, nn.Module) else ()
    modules = chain(model.modules(), of_criterion)
    with untouched(modules, device) as drawn, torch.no_grad():
        measure = _returned if loss.may_return else _compared
        findings = measure(model, batch, drawn, from_ranks)
    _conclude(loss, batch, findings)


def _conclude(loss: WindowLoss, batch: Any, findings: Sequence[Finding]) -> None:
    """Use, on all ranks, what any of them has found."""
    for finding in findings:
        if finding.problem:
            raise DivisorError(finding.problem)
    for finding in findings:
        if finding.divisor is not None:
            loss.use(finding.divisor)
            return
    if any(finding.retry for finding in findings) and not any(f.done for f in findings):
        return  # the loss of this batch is not finite: the next one may tell
    loss.unproved = False
    reasons = [finding.reason for finding in findings if finding.reason]
    if reasons:
        _logger.warning(_UNMEASURED, loss.name, reasons[0], loss.counted_as(batch))


def _returned(
    model: _Model,
    batch: Any,
    drawn: Callable[[], bool],
    from_ranks: Callable[[Finding], list[Finding]],
) -> list[Finding]:
    """Measure a loss that the model returns."""
    loss = model.loss
    first = _in_parts(batch)
    finding, own, ignored = _look(model, first.sample, batch, drawn)
    if not finding.done and own is not None and first.splittable:
        finding = finding._replace(samples=first.samples)
    findings = from_ranks(finding)
    if all(each.done for each in findings) or any(not e.done and not e.samples for e in findings):
        return findings
    # Ranks may communicate in a forward pass, so that all of them run the same number.
    least = min(each.samples for each in findings if not each.done)
    keeps_sample = least == 2
    parts = first if keeps_sample else first.without_one(ignored)
    trials = [Trial(first.sample, float(own))] if keeps_sample and own is not None else []
    reason = ""
    wanted = [parts.rest, parts.whole] if keeps_sample else [*parts.halves, parts.whole]
    for part in wanted:
        try:
            value = returned_loss(model.outputs(part))
            trials.append(Trial(part, float("nan") if value is None else float(value)))
        except Exception as error:
            reason = f"it does not take a part of a batch ({type(error).__name__})"
    if finding.done:
        return from_ranks(finding)
    if reason or len(trials) < 3:
        return from_ranks(Finding(done=True, reason=reason or "a part of a batch has no loss"))
    if drawn():
        return from_ranks(Finding(done=True, reason=_RANDOM))
    return from_ranks(_verdict(loss, [Variation(trials[-1], trials[:-1])], _rounding(own)))


def _look(
    model: _Model, sample: Any, batch: Any, drawn: Callable[[], bool]
) -> tuple[Finding, Tensor | None, int | None]:
    """Return what one forward pass shows, the loss, and the label that is ignored."""
    attempts = ((sample, False), (batch, True))
    for part, training in attempts:
        with LossCalls() as calls:
            try:
                outputs = model.outputs(part, training)
            except Exception as error:
                if training:
                    reason = f"its model does not take a part of a batch ({type(error).__name__})"
                    return Finding(done=True, reason=reason), None, None
                continue
        own = returned_loss(outputs)
        if own is None and isinstance(logits_of(outputs), Tensor):
            return Finding(done=True), None, None  # their cross entropy is summed exactly
        if own is None:
            continue
        if not is_finite(float(own)):
            return Finding(retry=True), own, None
        divisor = calls.divisor_of(own, part)
        if divisor is not None:
            return Finding(done=True, divisor=divisor), own, None
        if training:
            reason = "the model returns it in training mode alone"
            return Finding(done=True, reason=reason), None, None
        if drawn():
            return Finding(done=True, reason=_RANDOM), own, None
        reason = "a batch has one sample, or tensors of several lengths"
        return Finding(reason=reason), own, _safe(calls.ignored_targets(part), batch)
    return Finding(done=True), None, None


def _safe(ignored: int | None, batch: Any) -> int | None:
    """Return a label that can be put in a batch; None if an accelerator might end the process."""
    targets = targets_of(batch)
    if ignored is None or targets is None:
        return None
    is_safe = targets.device.type == "cpu" or bool((targets == ignored).any())
    return ignored if is_safe else None


def _compared(
    model: _Model,
    batch: Any,
    drawn: Callable[[], bool],
    from_ranks: Callable[[Finding], list[Finding]],
) -> list[Finding]:
    """Measure a loss of outputs and targets."""
    finding = Finding(done=True)
    for training in (False, True):
        outputs = model.outputs(batch, training)
        if outputs is None:
            break  # the last stage, on another rank, has them
        try:
            finding = _of_outputs(model.loss, outputs, batch, drawn)
            break
        except DivisorError as error:
            finding = Finding(problem=str(error))
            break
        except Exception as error:
            reason = f"it does not take a part of a batch ({type(error).__name__})"
            finding = Finding(done=True, reason=reason)
            if model.pipeline is not None:
                break
    return from_ranks(finding)


def _of_outputs(loss: WindowLoss, outputs: Any, batch: Any, drawn: Callable[[], bool]) -> Finding:
    """Measure a criterion on parts of the outputs of a batch."""
    outputs = mapped(outputs, _full_precision)

    def value_of(part_of_outputs: Any, part: Any) -> Tensor:
        return loss.mean(part_of_outputs, part)

    drawn()  # by the forward pass
    with LossCalls() as calls:
        whole = value_of(outputs, batch)
    if not is_finite(float(whole)):
        return Finding(retry=True)
    divisor = calls.divisor_of(whole, batch)
    if divisor is not None:
        return Finding(done=True, divisor=divisor)
    if drawn():
        return Finding(done=True, reason=_RANDOM)
    samples = batch_size(batch)
    both = (outputs, batch)
    if samples < 2 or not _has_samples(outputs, samples) or not _has_samples(batch, samples):
        return Finding(done=True, reason="a batch has one sample, or tensors of several lengths")
    cut = 1 if samples < 3 else max(2, samples // 3)
    halves = [list(range(cut)), list(range(cut, samples))]

    def trial(changed: Any, index: Sequence[int]) -> Trial:
        part = _take(changed, index, samples)
        return Trial(part, float(value_of(_take(outputs, index, samples), part)))

    variations = []
    for value, changed in ((None, batch), *_variants(batch, cut)):
        try:
            parts = [trial(changed, index) for index in halves]
            whole_trial = trial(changed, range(samples))
            variations.append(Variation(whole_trial, parts, has_zeros=value == 0))
        except DivisorError:
            raise
        except Exception:
            if changed is batch:
                raise
    pairs = [trial(both[1], pair) for pair in combinations(range(min(samples, 3)), 2)]
    singles = [trial(both[1], [number]) for number in range(min(samples, 3))]
    of_pairs = zip(combinations(singles, 2), pairs, strict=True)
    further = [Variation(pair, list(parts)) for parts, pair in of_pairs]
    return _verdict(loss, variations, _rounding(whole), further)


# -- the verdict


class Trial(NamedTuple):
    """A part of a batch, and its loss."""

    batch: Any
    loss: float


class Variation(NamedTuple):
    """The whole and its parts."""

    whole: Trial
    parts: Sequence[Trial]
    has_zeros: bool = False  # that were put in the place of targets

    @property
    def is_finite(self) -> bool:
        return is_finite(self.whole.loss, *(part.loss for part in self.parts))

    def expected(self, items: Callable[[Any], float]) -> float:
        """Return the mean of the losses of the parts, weighted with their items."""
        counts = [items(part.batch) for part in self.parts]
        if not sum(counts):
            return float("nan")
        terms = [n * part.loss for n, part in zip(counts, self.parts, strict=True) if n]
        return sum(terms) / sum(counts)

    def fits_divisor(self, divisor: Divisor, rounding: float) -> bool:
        if divisor.counts != NOTHING:
            return self.fits(divisor.items, rounding)
        added = sum(part.loss for part in self.parts)
        return abs(added - self.whole.loss) <= rounding * self.size()

    def size(self) -> float:
        return max(abs(self.whole.loss), *(abs(part.loss) for part in self.parts))

    def fits(self, items: Callable[[Any], float], rounding: float) -> bool:
        return abs(self.expected(items) - self.whole.loss) <= rounding * self.size()

    def is_a_mean(self, rounding: float) -> bool:
        """Return whether the loss of the whole lies between those of its parts."""
        if not self.is_finite:
            return True  # a part has no items
        losses = [part.loss for part in self.parts]
        margin = rounding * self.size()
        return min(losses) - margin <= self.whole.loss <= max(losses) + margin


def _verdict(
    loss: WindowLoss,
    variations: Sequence[Variation],
    rounding: float,
    further: Sequence[Variation] = (),
) -> Finding:
    """Compare the whole with its parts, counted in each way that is known."""
    measured, *varied = variations
    varied = [variation for variation in varied if variation.is_finite]
    if not is_finite(measured.whole.loss):
        return Finding(retry=True)

    def guess(batch: Any) -> float:
        return loss.items(batch).items

    try:
        is_guess = measured.fits(guess, rounding)
        if is_guess and all(variation.fits(guess, rounding) for variation in varied):
            return Finding(done=True)
        for divisor in _candidates(loss, measured.whole.batch):
            every = [measured, *varied]
            if all(variation.fits_divisor(divisor, rounding) for variation in every):
                return Finding(done=True, divisor=divisor)
        # The data may never have the other values that were tried, but any data has zeros.
        for variation in varied:
            if variation.has_zeros:
                is_guess = is_guess and variation.fits(guess, rounding)
    except DivisorError as error:
        return Finding(problem=str(error))
    if is_guess:
        return Finding(done=True)
    means = [variation.is_a_mean(rounding) for variation in (measured, *further)]
    if not all(means):
        return Finding(done=True, reason=_OF_THE_BATCH)
    argument = "batch" if loss.takes_batch or loss.may_return else "targets"
    whole, expected = measured.whole, measured.expected(guess)
    problem = (
        f"the mean loss of a batch is not that of its parts: {loss.name} is {whole.loss:.6g} for "
        f"{batch_size(whole.batch)} samples, but the mean over {loss.counted_as(whole.batch)} of "
        f"its parts is {expected:.6g}, so that its mean is over something else: "
        f"{_WAY_OUT.format(argument)}"
    )
    return Finding(problem=problem)


def _candidates(loss: WindowLoss, batch: Any) -> Iterator[Divisor]:
    yield Divisor(NOTHING)
    targets = targets_of(batch)
    for counts in COUNTED if targets is not None else ():
        yield Divisor(counts, loss.ignored)
    for ignored in (-100, -1, 0) if targets is not None else ():
        yield Divisor(LABELS, ignored)
    yield Divisor(SAMPLES)


def _rounding(loss: Tensor | None) -> float:
    dtype = torch.float32 if loss is None or not loss.is_floating_point() else loss.dtype
    return float(torch.finfo(dtype).eps ** 0.5)


# -- parts of a batch


class _Parts(NamedTuple):
    """A batch, one sample of it, and its other samples."""

    whole: Any
    sample: Any
    rest: Any
    samples: int
    splittable: bool
    chosen: int = 0

    @property
    def halves(self) -> tuple[Any, Any]:
        return self.sample, self.rest

    def without_one(self, ignored: int | None) -> _Parts:
        """Return the parts without one of the other samples, and with labels that are ignored."""
        if self.samples < 3:
            return self
        numbers = [number for number in range(self.samples) if number != self.chosen]
        numbers = numbers[:-1]
        sample = self.sample
        if ignored is not None:
            sample = _with_targets(sample, lambda labels: _half_ignored(labels, ignored))
        rest = _take(self.whole, numbers, self.samples)
        return _Parts(_joined([sample, rest], 0), sample, rest, self.samples - 1, True)


def _in_parts(batch: Any) -> _Parts:
    samples = batch_size(batch)
    if samples < 2 or not _has_samples(batch, samples):
        return _Parts(batch, batch, batch, samples, False)
    targets = targets_of(batch)
    chosen = 0
    if targets is not None and len(targets) == samples and targets.ndim > 1:
        chosen = int((targets >= 0).flatten(1).sum(1).argmax())
    others = [number for number in range(samples) if number != chosen]
    sample = _take(batch, [chosen], samples)
    return _Parts(batch, sample, _take(batch, others, samples), samples, True, chosen)


def _half_ignored(labels: Tensor, ignored: int) -> Tensor:
    if labels.ndim < 2:
        return labels
    changed = labels.clone()
    changed[..., labels.shape[-1] // 2 + 1 :] = ignored
    return changed


def _variants(batch: Any, cut: int) -> Iterator[tuple[float, Any]]:
    """Yield a value that a mean may leave out, and the batch with it in its first part."""
    targets = targets_of(batch)
    if targets is None or cut < 2:
        return
    values: list[float] = [0]
    if targets.is_floating_point():
        values.append(float("nan"))
    if targets.device.type == "cpu":  # An accelerator would end the process at a wrong index.
        values += [-100, -1, -2]
    for value in values:

        def replaced(old: Tensor, value: float = value) -> Tensor:
            new = old.clone()
            flat = new[:cut].reshape(-1)
            flat[::2] = value
            new[:cut] = flat.reshape(new[:cut].shape)
            return new

        yield value, _with_targets(batch, replaced)


def _with_targets(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    targets = targets_of(batch)
    if targets is None:
        return batch
    if isinstance(batch, tuple | list):
        return [*batch[:-1], change(targets)]
    named = named_parts(batch) or {}
    name = target_name(named) or ""
    if not isinstance(batch, Mapping):
        return replace(batch, **{name: change(targets)})
    copied: Any = copy.copy(batch)
    copied[name] = change(targets)
    return copied


def _has_samples(value: Any, samples: int) -> bool:
    """Return whether all tensors hold one entry for each sample."""
    lengths = [len(tensor) for tensor in held_tensors(value) if tensor.ndim]
    return bool(lengths) and all(length == samples for length in lengths)


def _take(value: Any, index: Sequence[int], samples: int) -> Any:
    """Return some samples of a batch or of outputs."""
    listed = list(index)

    def of(tensor: Tensor) -> Tensor:
        return tensor[listed] if tensor.ndim and len(tensor) == samples else tensor

    return mapped(value, of)


def _joined(batches: Iterable[Any], enough: int = 3) -> Any:
    """Return the first batch, with others joined to it while it has fewer samples than enough."""
    read = iter(batches)
    batch = next(read)
    while not enough or batch_size(batch) < enough:
        other = next(read, None)
        if other is None:
            break
        try:
            batch = _concatenated(batch, other)
        except (RuntimeError, TypeError, ValueError, KeyError):
            break  # sequences of another length
    return batch


def _concatenated(first: Any, second: Any) -> Any:
    if isinstance(first, Tensor):
        return torch.cat([first, second]) if first.ndim else first
    if isinstance(first, tuple | list):
        return [_concatenated(a, b) for a, b in zip(first, second, strict=True)]
    if isinstance(first, Mapping):
        changed: Any = copy.copy(first)
        for name in first:
            changed[name] = _concatenated(first[name], second[name])
        return changed
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        parts = {n: _concatenated(getattr(first, n), getattr(second, n)) for n in names}
        return replace(first, **parts)
    return first


def _full_precision(tensor: Tensor) -> Tensor:
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if is_half else tensor


# -- without a trace


@contextmanager
def untouched(modules: Iterable[nn.Module], device: torch.device) -> Iterator[Callable[[], bool]]:
    """Leave generators, buffers and counts of modules as they were.

    A count is an attribute that is a number. Flags stay: some say that a hook was registered.
    Yields a function that returns whether a random number was drawn since its last call.
    """
    held = list(modules)
    training = [(module, module.training) for module in held]
    numbers = [(vars(module), _numbers_of(module)) for module in held]
    buffers: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor, int]] = [
        (module._buffers, name, buffer, buffer.detach().clone(), buffer._version)
        for module in held
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]
    devices = [device] if device.type == "cuda" else []
    is_compiling = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()
    python, arrays = random.getstate(), np.random.get_state()
    last = [_generators(device)]

    def drawn() -> bool:
        now = _generators(device)
        same = all(torch.equal(a, b) for a, b in zip(now, last[0], strict=True))
        last[0] = now
        return not same

    try:
        with torch.random.fork_rng(devices), eager:
            yield drawn
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        for module, was_training in training:
            module.training = was_training
        for attributes, before in numbers:
            for name in [name for name, value in attributes.items() if type(value) in (int, float)]:
                if name not in before:
                    del attributes[name]  # a count that began in a class attribute
            attributes.update(before)
        with torch.no_grad():
            for owner, name, buffer, before_buffer, version in buffers:
                if buffer._version != version:
                    buffer.copy_(before_buffer)
                owner[name] = buffer


def _numbers_of(module: nn.Module) -> dict[str, int | float]:
    values = vars(module).items()
    return {name: value for name, value in values if type(value) in (int, float)}


def _generators(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a loss may draw from."""
    arrays: Any = np.random.get_state()
    states = [torch.get_rng_state(), torch.from_numpy(arrays[1].astype(np.int64))]
    states.append(torch.tensor([arrays[2], *random.getstate()[1]]))
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
