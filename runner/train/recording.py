"""What a :class:`runner.Trainer` measures, and where the rows of its training go."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGINT
from typing import Any

import torch

from runner.booster import Booster, Plugin
from runner.clip import ClipMode
from runner.config.accumulation import AccumulationSteps
from runner.config.notation import Duration
from runner.gradients import Layout, transfer
from runner.run_folder.strict_json import cut
from runner.telemetry.dominant import Dominant
from runner.telemetry.gauges import Gauges
from runner.telemetry.meter import Meter
from runner.telemetry.sinks import Sink
from runner.telemetry.sinks.console import TerminalSink, is_watched
from runner.telemetry.sinks.destination import To, file_of, sink_of
from runner.train.options import Log
from runner.train.progress import length

NO_NOISE_SCALE = "needs two or more microbatches of plugin=single or ddp, and clip.norm_type=2"
_NOISE_ROWS = 100  # of which the noise scale is the mean
_LINES = 10  # of a training, where there is no terminal


def make_meter(
    log: Log,
    mode: ClipMode,
    layout: Layout,
    booster: Booster,
    most_microbatches: int,
    pipelined: bool,
) -> Meter:
    """Return what collects the metrics of a training, still without sinks.

    Raises:
        ValueError: ``log`` asks for the noise scale, which this training cannot measure.
    """
    plugin = booster.plugin
    measurements = log.measurements
    meter = Meter(interval=log.interval, flush_every=log.flush, what_if=log.what_if)
    meter.skips = booster.skip is not None
    if plugin.data_size > 1 or pipelined:
        meter.mean_over_data = mean_over_data(plugin)
    if measurements.noise_scale:
        splits_model = layout.group is not None or plugin.data_size < plugin.world_size
        if splits_model or most_microbatches < 2 or mode.norm_type != 2.0:
            raise ValueError(f"noise_scale {NO_NOISE_SCALE}")
        meter.noise = deque(maxlen=_NOISE_ROWS)
    if log.per_layer or measurements.update_ratio or measurements.zeros:
        meter.layers = Gauges(
            layout,
            mode.norm_type,
            per_layer=log.per_layer,
            updates=measurements.update_ratio,
            zeros=measurements.zeros,
        )
    if log.top and math.isfinite(mode.norm_type):
        meter.dominant = Dominant(layout, mode.norm_type, log.top)
    return meter


def mean_over_data(plugin: Plugin) -> Callable[[list[float]], list[float]]:
    """Return a function that averages numbers over the data-parallel ranks; a collective."""

    def mean(values: list[float]) -> list[float]:
        return [total / plugin.data_size for total in plugin.sum_over_data(values)]

    return mean


class Sinks:
    """Where the rows of a training go: the files, sinks and functions of ``Log.sinks``, and a bar.

    Sinks and functions are closed by who made them, all else by :meth:`close`.

    Args:
        sinks: ``Log.sinks``.
        opens: whether this rank opens files, as the first one does.
        step: the step after which a training continues; later rows are removed from files.
        bar: what the terminal shows; None for nothing.
    """

    def __init__(
        self, sinks: To | Sequence[To], opens: bool, step: int, bar: TerminalSink | None
    ) -> None:
        self._given: list[Sink] = []
        self._opened: list[Sink] = []
        for to in _destinations(sinks):
            if not isinstance(to, str | Path):
                self._given.append(sink_of(to))
            elif opens:
                if step > 0:
                    cut(file_of(to), step)
                self._opened.append(sink_of(to))
        if bar is not None:
            self._opened.append(bar)

    @property
    def all(self) -> list[Sink]:
        """What takes each row."""
        return [*self._given, *self._opened]

    def close(self, summary: dict[str, Any]) -> None:
        """Tell what was opened that the training has finished."""
        for sink in self._opened:
            sink.close(summary, 0)

    def close_after(self, error: BaseException) -> None:
        """Tell what was opened that an exception has ended the training; raise nothing."""
        signal = SIGINT if isinstance(error, KeyboardInterrupt) else getattr(error, "signal", 0)
        for sink in self._opened:
            with suppress(Exception):
                sink.close(None, 128 + signal if signal else 1)


def _destinations(sinks: To | Sequence[To]) -> list[To]:
    return list(sinks) if isinstance(sinks, list | tuple) else [sinks]  # type: ignore[list-item]


def flushes_each_step(plugin: Plugin, device: torch.device) -> bool:
    """Return whether somebody watches a terminal, and a transfer of metrics costs nothing."""
    is_collective = plugin.world_size > 1
    return is_watched(sys.stderr) and not is_collective and transfer.can_read(device)


def make_bar(
    log: Log, loader: Iterable[Any], duration: Duration, accumulation: AccumulationSteps
) -> TerminalSink:
    """Return the bar of a training, or its lines where there is no terminal."""
    microbatches = None
    with suppress(TypeError):  # a stream has no length
        microbatches = len(loader)  # type: ignore[arg-type]
    steps = None
    counts_samples = "sp" in {mark.unit for mark in (duration, *accumulation.starts)}
    if not counts_samples:  # the samples of a microbatch are not known
        whole = length(duration, microbatches, 1, None, accumulation)
        steps = None if whole is None else whole.steps
    interval = max(log.interval, (steps or _LINES * 100) // _LINES)
    is_recorded = bool(_destinations(log.sinks))
    return TerminalSink(steps, interval, "training", is_recorded=is_recorded)
