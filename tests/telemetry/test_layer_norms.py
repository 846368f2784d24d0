"""Layer norms stay on the device until the flush, and are measured for rows that are due alone."""

import math
from unittest.mock import patch

import pytest
import torch

from runner import Trainer
from runner.clip import Decision, Layout, build
from runner.telemetry.layer_norms import LayerNorms
from runner.telemetry.meter import Meter
from runner.telemetry.step import StepMetrics, on_host
from tests.distributed.training import Rows
from tests.on_device import Waits, kept_on_device
from tests.train.test_trainer import parts

STEPS, INTERVAL, FLUSH = 14, 3, 4


def trained(norm_type=2.0, **options):
    """Rows of a short training, and the trainer, which has not run."""
    model, loader = parts(samples=112)
    rows = Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    trainer = Trainer(
        model,
        list(loader),
        f"{STEPS}ba",
        build("norm", threshold=0.3, norm_type=norm_type),
        optimizers=optimizer,
        sinks=[rows],
        log_interval=INTERVAL,
        log_flush=FLUSH,
        **options,
    )
    return rows.rows, trainer


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_no_step_waits_for_the_device_and_each_flush_is_one_transfer(norm_type):
    rows, trainer = trained(norm_type, per_layer=True)
    measured, transfers = [], []
    share, tolist = LayerNorms.share, torch.Tensor.tolist

    def counted_share(self, powers):
        measured.append(trainer.state.progress.step + 1)
        return share(self, powers)

    def counted_list(tensor):
        if tensor.is_floating_point():  # not the targets of a batch, which are on the host
            transfers.append(trainer.state.progress.step)
        return tolist(tensor)

    with (
        kept_on_device(),
        patch.object(LayerNorms, "share", counted_share),
        patch.object(torch.Tensor, "tolist", counted_list),
        Waits() as waits,
    ):
        trainer.fit()
    assert not waits.found
    assert measured == [3, 6, 9, 12, 14]
    assert transfers == [4, 8, 12, 14]
    assert [row["train/step"] for row in rows] == measured


def test_rows_are_the_same_wherever_layer_norms_are_kept():
    here, trainer = trained(per_layer=True)
    trainer.fit()
    with kept_on_device():
        kept, trainer = trained(per_layer=True)
        trainer.fit()
    plain, trainer = trained()
    trainer.fit()
    keys = {f"grad/norm/{name}" for name, _ in trainer.model.unwrap().named_parameters()}
    for ours, wanted, without in zip(kept, here, plain, strict=True):
        assert keys == ours.keys() - without.keys() == wanted.keys() - without.keys()
        for key in keys:
            assert ours[key] == pytest.approx(wanted[key], rel=1e-6)
        total = math.sqrt(sum(ours[key] ** 2 for key in keys))
        assert total == pytest.approx(ours["grad/norm"], rel=1e-6)


def test_an_evaluation_gives_a_step_layer_norms_too():
    model, loader = parts()
    rows = Rows()
    options = {"eval_interval": "2ba", "log_interval": 5, "per_layer": True}
    Trainer(model, loader, "7ba", eval_dataloader=loader, sinks=[rows], **options).fit()
    assert [row["train/step"] for row in rows.rows] == [2, 4, 5, 6, 7]
    assert all("grad/norm/0.weight" in row for row in rows.rows)


class Sharded(LayerNorms):
    """Layer norms of which other ranks have a part."""

    spans_ranks = True

    def over_ranks(self, shares):
        raise AssertionError("no other rank takes part")


def test_a_run_that_breaks_off_leaves_out_norms_that_need_the_other_ranks():
    model, _ = parts()
    layout = Layout.of_model(model)
    for kind, present in ((LayerNorms, True), (Sharded, False)):
        rows = Rows()
        meter = Meter([rows], layers=kind(layout))
        decision = Decision.untouched(1.0, 2.0, 1.0)
        share = torch.ones(len(layout.names), dtype=torch.float64)
        meter.push(StepMetrics(1, 1.0, decision, 0.1, 8, 0, 0.5, share))
        meter.flush(together=False)
        assert ("grad/norm/0.weight" in rows.rows[0]) == present


def test_values_on_a_device_and_on_the_host_may_be_mixed():
    values, norms = on_host([(1.0, torch.tensor(2.0))], torch.tensor([[3.0, 4.0]]))
    assert (values, list(norms)) == ([[1.0, 2.0]], [[3.0, 4.0]])
