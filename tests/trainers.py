"""Trainers for tests whose options are told by one dictionary."""

from dataclasses import fields

from torch import nn

from runner import Booster, Evaluate, InBackward, Log, SkippedSteps, Trainer

BOOSTER = {"plugin": "plugin", "precision": "mixed_precision", "loss_scale": "loss_scale"}
BOOSTER |= {"nonfinite": "nonfinite", "skip": "skip"}
LOG = {"log_interval": "interval", "log_flush": "flush"}
LOG |= {field.name: field.name for field in fields(Log) if field.name not in LOG.values()}
EVALUATE = {"eval_interval": "interval", "eval_metrics": "metrics"}


def trainer_of(
    model,
    loader,
    duration="1ep",
    algorithms=(),
    *,
    saver=None,
    in_backward="",
    kind=Trainer,
    **options,
):
    """A Trainer; options of its groups are given by the names that they have in ``conf/``."""

    def taken(names):
        return {name: options.pop(key) for key, name in names.items() if key in options}

    booster = Booster(**taken(BOOSTER))
    log = Log(**taken(LOG))
    evaluate = taken(EVALUATE)
    callbacks = [*options.pop("callbacks", ()), *([] if saver is None else [saver])]
    if "max_skips" in options:
        callbacks.append(SkippedSteps(options.pop("max_skips")))
    held_out = options.pop("eval_dataloader", None)
    stop = options.pop("stop", None)
    if device := options.pop("device", None):
        model.to(device)
        if isinstance(criterion := options.get("criterion"), nn.Module):
            criterion.to(device)
    training = kind(
        model,
        loader,
        duration,
        InBackward(algorithms, in_backward == "step") if in_backward else algorithms,
        Evaluate(held_out, **evaluate) if evaluate else held_out,
        booster=booster,
        log=log,
        callbacks=callbacks,
        **options,
    )
    if stop is not None:
        training.stop = stop
    return training


def fitted(made, path=None):
    """Train, from a checkpoint if one is given, and return the trainer."""
    if path is not None:
        made.load(path)
    made.fit()
    return made
