"""Metrics of held-out data are those of scikit-learn on all of it, however it is split."""

import json

import pytest
import torch
from sklearn import metrics as sklearn
from torch import nn

from runner import Trainer
from runner.booster import SinglePlugin
from runner.booster.plugin import PipelineParallelPlugin, TensorParallelPlugin, TorchDDPPlugin
from runner.cli.main import main
from runner.data.dataset import Data, TensorPairs
from tests.distributed.training import Rows
from tests.ranks import run_ranks

pytest.importorskip("torchmetrics")

HELD_OUT, CLASSES, IGNORED = 13, 3, -100
"""13 samples in batches of 2 on each of two ranks: the last one has a sample on one rank alone."""
PLUGINS = {
    "single": SinglePlugin,
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


def evaluated(plugin, kind):
    spread, model = PLUGINS[plugin](), network(kind)
    data = TensorPairs(*held_out(kind))
    trainer = Trainer(
        model,
        spread.prepare_dataloader(data, 2),
        "1ba",
        (),
        spread.prepare_dataloader(data, 2),
        torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=CRITERIA[kind](),
        plugin=spread,
        eval_metrics=NAMES[kind],
        sinks=[rows := Rows()],
    )
    trainer.fit()
    again = trainer.evaluate()
    assert again == {key: rows.rows[-1][key] for key in again}
    return again


def of_every_kind(plugin):
    return {kind: evaluated(plugin, kind) for kind in NAMES}


def by_sklearn(kind):
    inputs, targets = held_out(kind)
    with torch.no_grad():
        outputs = network(kind)(inputs)
    if kind == "numbers":
        wanted, got = targets.flatten().numpy(), outputs.flatten().numpy()
        return {
            "eval/mse": sklearn.mean_squared_error(wanted, got),
            "eval/mae": sklearn.mean_absolute_error(wanted, got),
            "eval/r2": sklearn.r2_score(wanted, got),
            "eval/pearson": torch.corrcoef(torch.stack([targets[:, 0], outputs[:, 0]]))[0, 1],
        }
    if kind == "labels":
        wanted, got = targets.flatten().numpy(), (outputs.flatten() > 0).numpy()
        accuracy = sklearn.accuracy_score(wanted, got)
        return {"eval/accuracy": accuracy, "eval/f1": sklearn.f1_score(wanted, got)}
    counted = targets != IGNORED
    wanted, chances = targets[counted].numpy(), outputs[counted].softmax(1).numpy()
    got = chances.argmax(1)
    return {
        "eval/accuracy": sklearn.accuracy_score(wanted, got),
        "eval/f1": sklearn.f1_score(wanted, got, average="macro"),
        "eval/auroc": sklearn.roc_auc_score(wanted, chances, average="macro", multi_class="ovr"),
        "eval/f1_score": sklearn.f1_score(wanted, got, average="micro"),
    }


@pytest.mark.parametrize("plugin", PLUGINS)
def test_metrics_are_those_of_scikit_learn(plugin):
    single = plugin == "single"
    everywhere = [of_every_kind(plugin)] if single else run_ranks(of_every_kind, 2, plugin)
    for kind in NAMES:
        wanted = by_sklearn(kind)
        for found in everywhere:
            assert found[kind].keys() - {"eval/loss"} == wanted.keys()
            for key, value in wanted.items():
                # torchmetrics sums in float32.
                assert found[kind][key] == pytest.approx(float(value), rel=1e-5), (kind, key)
        assert all(found == everywhere[0] for found in everywhere)


# -- what a user types


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.layer(inputs)


def numbers():
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    data = TensorPairs(inputs, inputs[:, :1])
    return Data(train=data, test=data, items="samples")


HERE = "tests.train.test_eval_metrics"
NUMERIC = [
    *(f"model._target_={HERE}.Net", "~model.num_classes", "~model.width"),
    *(f"data._target_={HERE}.numbers", "~data.seed", "~data.test_fraction"),
    "loss._target_=torch.nn.MSELoss",
]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            [*NUMERIC, "eval.metrics=[f1]"],
            ["eval.metrics=f1", "compares classes", "numbers: mse"],
        ),
        (["eval.metrics=[mse]"], ["eval.metrics=mse", "compares numbers", "f1"]),
        (["eval.metrics=[acuracy]"], ["eval.metrics=acuracy", "did you mean accuracy?"]),
        (["eval.metrics=f1"], ["eval.metrics=f1", "must be a list of names"]),
        (["eval.metrics=[f1,f1]"], ["twice"]),
        (["eval.metrics=[{_target_:torch.nn.ReLU}]"], ["not a torchmetrics.Metric"]),
        (
            ["-m", "seed=0,1", "eval.metrics=[f1]", "sweep.objective=eval/f2"],
            ["did you mean eval/f1?"],
        ),
    ],
    ids=[
        "f1_of_numbers",
        "mse_of_classes",
        "unknown",
        "no_list",
        "twice",
        "no_metric",
        "objective",
    ],
)
def test_a_metric_that_does_not_fit_is_refused_at_the_door(words, parts, outputs, capfd):
    assert main(words) == 2
    message = capfd.readouterr().err
    for part in parts:
        assert part in message
    assert not outputs.exists()


def test_numeric_targets_need_a_criterion(outputs, capfd):
    assert main(NUMERIC[:-1]) == 2
    message = capfd.readouterr().err
    assert "loss._target_=null  must name a criterion, such as torch.nn.MSELoss" in message
    assert not outputs.exists()


def test_a_run_logs_metrics_and_is_compared_by_them(outputs):
    words = ["-m", "eval.metrics=[f1]", "sweep.objective=eval/f1", "train.max_duration=10ba"]
    assert main([*words, "tracker=none", "eval.interval=5ba", "optimizer.lr=1e-9,0.05"]) == 0
    for folder in sorted(outputs.rglob("summary.json")):
        lines = (folder.parent / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        values = [row["eval/f1"] for row in rows if "eval/f1" in row]
        assert len(values) == 2
        assert json.loads(folder.read_text())["best"]["eval/f1"] == max(values)
    [page] = outputs.rglob("sweep.json")
    assert (page.parent / "report.html").read_text().count("eval/f1") > 1
