"""A metric of evaluations that raises an exception where a test plants it."""

import torchmetrics

from tests.launch.raising import Counted, fail

COUNTED = Counted("metric")  # each evaluation has a copy of the metric


class Metric(torchmetrics.MeanMetric):
    def update(self, outputs, targets):
        if COUNTED.fails():
            fail()
        super().update(outputs.mean())
