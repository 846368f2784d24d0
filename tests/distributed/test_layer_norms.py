"""Layer norms of a model on several ranks are those of one process; one collective a flush."""

from typing import Any

import pytest

from tests.distributed.cases import Case, trainer
from tests.distributed.test_collectives import Counting
from tests.distributed.training import Rows
from tests.on_device import call_kept_on_device
from tests.ranks import run_ranks

STEPS, INTERVAL, FLUSH = 8, 2, 4
MODEL = {"ddp": "tied", "fsdp": "tied", "zero1": "gpt", "tensor": "gpt", "1f1b": "tied"}


def trained(plugin: str | None, model: str, mode: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Rows with layer norms, and the number of collectives in each flush of the meter."""
    rows = Rows()
    case = Case(model, mode, 2, steps=STEPS)
    options = {"per_layer": True, "log_interval": INTERVAL, "log_flush": FLUSH}
    made = trainer(case, plugin, sinks=[rows], **options)
    calls, meter = [], made.state.meter
    flush = meter.flush

    def counted(*args: Any, **keywords: Any) -> None:
        with Counting() as counter:
            flush(*args, **keywords)
        calls.append(counter.calls.total())

    meter.flush = counted  # type: ignore[method-assign]
    made.fit()
    return rows.rows, calls


@pytest.mark.parametrize("plugin", MODEL)
@pytest.mark.parametrize("mode", ["L2", "inf"])
def test_layer_norms_are_those_of_one_process_in_one_collective(plugin, mode):
    wanted, _ = trained(None, MODEL[plugin], mode)
    ranks = run_ranks(call_kept_on_device, 2, trained, plugin, MODEL[plugin], mode)
    for rows, calls in ranks:
        for row, expected in zip(rows, wanted, strict=True):
            layers = {key for key in expected if key.startswith("grad/norm/")}
            assert layers
            assert layers == {key for key in row if key.startswith("grad/norm/")}
            for key in layers:
                assert row[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-15), key
        # One for the loss, where data is divided or the loss is another rank's; one for the norms
        # of a model that no rank has all gradients of.
        loss = plugin != "tensor"
        assert calls == [loss + (plugin != "ddp")] * (STEPS // FLUSH)
