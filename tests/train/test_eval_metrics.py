"""Metrics of held-out data are those of scikit-learn on all of it, however it is split."""

import pytest
import torch
from sklearn import metrics as sklearn
from torch import nn

from runner import Booster, Evaluate, Log, Trainer
from runner.booster import SinglePlugin
from runner.booster.plugin import PipelineParallelPlugin, TensorParallelPlugin, TorchDDPPlugin
from runner.data.dataset import TensorPairs
from tests.distributed.training import Rows
from tests.ranks import run_ranks

pytest.importorskip("torchmetrics")

HELD_OUT = 13
CLASSES = 3
IGNORED = -100
"""13 samples in batches of 2 on each of two ranks: the last one has a sample on one rank alone."""
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "tensor": lambda: TensorParallelPlugin(tp_plan={"0": "colwise", "2": "rowwise"}),
    "pipeline": lambda: PipelineParallelPlugin(num_microbatches=2),
}
PEARSON = {"_target_": "torchmetrics.PearsonCorrCoef", "name": "pearson"}
MICRO = {"_target_": "torchmetrics.F1Score", "task": "multiclass", "num_classes": CLASSES}
NAMES = {
    "classes": ["accuracy", "f1", "auroc", MICRO],
    "labels": ["accuracy", "f1"],
    "numbers": ["mse", "mae", "r2", PEARSON],
}
ASKED = [*(("ddp", kind) for kind in NAMES), ("tensor", "classes"), ("pipeline", "labels")]
CRITERIA = {"classes": lambda: None, "labels": nn.BCEWithLogitsLoss, "numbers": nn.MSELoss}


def network(kind):
    torch.manual_seed(0)
    outputs = CLASSES if kind == "classes" else 1
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def held_out(kind):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(HELD_OUT, 4, dtype=torch.float64, generator=generator)
    if kind == "classes":
        targets = torch.randint(CLASSES, (HELD_OUT,), generator=generator)
        targets[3] = IGNORED
    elif kind == "labels":
        targets = (inputs.sum(1, keepdim=True) > 0).double()
    else:
        targets = inputs[:, :1] - inputs[:, 1:2].square()
    return inputs, targets


def evaluated(asked):
    """The metrics of some kinds of targets under some plugins."""
    metrics = {}
    for name, kind in asked:
        plugin = PLUGINS.get(name, SinglePlugin)()
        model = network(kind)
        loader = plugin.prepare_dataloader(TensorPairs(*held_out(kind)), 2)
        options = {"booster": Booster(plugin=plugin), "log": Log([rows := Rows()])}
        options |= {"optimizers": torch.optim.SGD(model.parameters(), lr=0.0)}
        options |= {"criterion": CRITERIA[kind]()}
        trainer = Trainer(model, loader, "1ba", (), Evaluate(loader, NAMES[kind]), **options)
        trainer.fit()
        metrics[name, kind] = trainer.evaluate()
        assert metrics[name, kind].items() <= rows.rows[-1].items(), (name, kind)
    return metrics


def by_sklearn(kind):
    inputs, targets = held_out(kind)
    with torch.no_grad():
        outputs = network(kind)(inputs)
    expected = targets.flatten().numpy()
    predicted = outputs.flatten().numpy()
    if kind == "numbers":
        return {
            "eval/mse": sklearn.mean_squared_error(expected, predicted),
            "eval/mae": sklearn.mean_absolute_error(expected, predicted),
            "eval/r2": sklearn.r2_score(expected, predicted),
            "eval/pearson": torch.corrcoef(torch.stack([targets[:, 0], outputs[:, 0]]))[0, 1],
        }
    if kind == "labels":
        accuracy = sklearn.accuracy_score(expected, predicted > 0)
        f1 = sklearn.f1_score(expected, predicted > 0)
        return {"eval/accuracy": accuracy, "eval/f1": f1}
    counted = targets != IGNORED
    expected = targets[counted].numpy()
    chances = outputs[counted].softmax(1).numpy()
    predicted = chances.argmax(1)
    return {
        "eval/accuracy": sklearn.accuracy_score(expected, predicted),
        "eval/f1": sklearn.f1_score(expected, predicted, average="macro"),
        "eval/auroc": sklearn.roc_auc_score(expected, chances, average="macro", multi_class="ovr"),
        "eval/f1_score": sklearn.f1_score(expected, predicted, average="micro"),
    }


def test_metrics_are_those_of_scikit_learn():
    first, second = run_ranks(evaluated, 2, ASKED)
    assert first == second
    single = evaluated([("single", kind) for kind in NAMES])
    for (plugin, kind), metrics in (single | first).items():
        expected = by_sklearn(kind)
        assert metrics.keys() - {"eval/loss"} == expected.keys(), (plugin, kind)
        for key, value in expected.items():
            # torchmetrics sums in float32.
            assert metrics[key] == pytest.approx(float(value), rel=1e-5), (plugin, kind, key)
