"""The tensors of boosted models and optimizers by name, and files of them for any layout of ranks.

The state of an optimizer for ``net.weight`` is ``optimizer/0/net.weight/exp_avg`` and the like.
``torch.distributed.checkpoint.state_dict`` would step an optimizer to load it, and knows neither
pipeline stages nor the parts of ZeRO stage 1.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint

from runner.checkpoint.shards import Folder, Stored, write
from runner.config.notation import first_few
from runner.gradients import Layout
from runner.parallel.collectives import from_all, on_first
from runner.parallel.full_state_dict import gathered, load
from runner.parallel.pipeline import Pipeline
from runner.parallel.sharding import reshard

OPTIMIZER = "optimizer/"
"""Prefix of the names of an optimizer's tensors."""

# What depends on where parameters lie, and what a program says of clipping
_OF_LAYOUT = ("params", "param_names", "fused", "foreach", "clip")
_RATES = ("initial_lr", "max_lr", "min_lr")  # of torch's schedulers
_VALUES = "optimizer.pt"
_SAFETENSORS = ".safetensors"


class BoostedModel(Protocol):
    """What is saved of a :class:`runner.booster.ModelWrapper`."""

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages of this rank; None for a model in one piece."""

    @property
    def names(self) -> Mapping[str, str]:
        """Each name in the whole model, with the first name of its tensor."""

    @property
    def renamed(self) -> Mapping[str, str]:
        """Names in the whole model, by the names on this rank."""

    def unwrap(self) -> nn.Module:
        """Return the module of this rank."""


class BoostedOptimizer(Protocol):
    """What is saved of a :class:`runner.booster.OptimizerWrapper`."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of torch that step together."""

    @property
    def layout(self) -> Layout:
        """Names and placement of the parameters."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""

    def rest_of_state(self) -> dict[str, Any]:
        """Return what is saved besides the state of the optimizers."""

    def load_rest(self, values: Mapping[str, Any]) -> None:
        """Load what :meth:`rest_of_state` returned."""


def model_tensors(model: BoostedModel, with_buffers: bool = True) -> dict[str, Tensor]:
    """Return the tensors of a model on this rank by name, one of each tied one."""
    return {name: copies[0] for name, copies in model_slots(model, with_buffers).items()}


def model_slots(model: BoostedModel, with_buffers: bool = True) -> dict[str, list[Tensor]]:
    """Return the tensors of a model by name; a rank with two stages may hold a tied one twice."""
    module = model.unwrap()
    stages = () if model.pipeline is None else model.pipeline.stages.values()
    reshard([module, *stages])  # a forward pass may have left whole parameters for the shards
    slots: dict[str, list[Tensor]] = {}
    names = set(model.names.values())
    buffers = module.named_buffers() if with_buffers else ()
    for local_name, tensor in (*module.named_parameters(), *buffers):
        name = model.renamed.get(local_name, local_name)
        if name in names:
            slots.setdefault(name, []).append(tensor)
    return slots


def optimizer_tensors(optimizer: BoostedOptimizer) -> dict[str, Tensor]:
    """Return the tensors in the state of the optimizers of this rank, by name."""
    return {key: value for key, value in _state(optimizer) if isinstance(value, Tensor)}


def optimizer_values(optimizer: BoostedOptimizer) -> dict[str, Any]:
    """Return the values of the optimizers that are no tensors; every rank has to call this."""
    of_ranks = from_all({k: v for k, v in _state(optimizer) if not isinstance(v, Tensor)})
    groups = []
    for plain in optimizer.optimizers:
        settings = []
        for group in plain.param_groups:
            settings.append({key: group[key] for key in group if key not in _OF_LAYOUT})
        groups.append(settings)
    return {
        "kinds": _kinds(optimizer),
        "groups": groups,
        "state": {key: value for of_rank in of_ranks for key, value in of_rank.items()},
        **optimizer.rest_of_state(),
    }


def _kinds(optimizer: BoostedOptimizer) -> list[str]:
    return [type(plain).__name__ for plain in optimizer.optimizers]


def optimizer_slots(
    optimizer: BoostedOptimizer,
    stored: Mapping[str, Stored],
    values: Mapping[str, Any],
    keep: Collection[str] = (),
) -> tuple[dict[str, list[Tensor]], Callable[[], None]]:
    """Return tensors to load the state of optimizers into, and a function that then assigns it."""
    _require_same_optimizers(optimizer, values, same_groups="groups" not in keep)
    states: dict[str, list[_StepState]] = {}
    for step_state in _step_states(optimizer):
        states.setdefault(step_state.name, []).append(step_state)
    tensors: dict[str, list[Tensor]] = {}
    for key in (*stored, *values["state"]):
        name, _, field = key.rpartition("/")
        for step_state in states.get(name, ()):
            if key in stored:
                tensor = _empty(key, stored[key], step_state.parameter, step_state.group)
                tensors.setdefault(key, []).append(tensor)
                step_state.loaded[field] = tensor
            else:
                step_state.loaded[field] = values["state"][key]

    def assign() -> None:
        for of_name in states.values():
            for step_state in of_name:
                if step_state.loaded:
                    step_state.optimizer.state[step_state.parameter] = step_state.loaded
        if "groups" not in keep:
            _load_settings(optimizer, values, keep)
        optimizer.load_rest(values)

    return tensors, assign


def _load_settings(
    optimizer: BoostedOptimizer, values: Mapping[str, Any], keep: Collection[str]
) -> None:
    """Load the settings of the parameter groups, except the names in ``keep``."""
    kept = {*keep, *(_RATES if "lr" in keep else ())}
    all_settings = [settings for groups in values["groups"] for settings in groups]
    for group, settings in zip(optimizer.param_groups, all_settings, strict=True):
        group.update({key: settings[key] for key in settings.keys() - kept})


def _require_same_optimizers(
    optimizer: BoostedOptimizer, values: Mapping[str, Any], same_groups: bool
) -> None:
    saved = values["kinds"]
    kinds = _kinds(optimizer)
    if saved != kinds:
        raise ValueError(f"the state is that of {', '.join(saved)}, not of {', '.join(kinds)}")
    saved_counts = [len(groups) for groups in values["groups"]]
    counts = [len(plain.param_groups) for plain in optimizer.optimizers]
    if same_groups and saved_counts != counts:
        raise ValueError(f"the state is that of {saved_counts} parameter groups, not {counts}")


class _StepState(NamedTuple):
    """A parameter that an optimizer of this rank steps, and the name of its state."""

    name: str
    optimizer: Optimizer
    group: dict[str, Any]
    parameter: nn.Parameter
    loaded: dict[str, Any]  # the state that is being loaded


def _step_states(optimizer: BoostedOptimizer) -> Iterator[_StepState]:
    names = {id(shard.param): shard.name for shard in optimizer.layout.shards}
    for number, plain in enumerate(optimizer.optimizers):
        for group in plain.param_groups:
            for parameter in group["params"]:
                name = f"{OPTIMIZER}{number}/{names[id(parameter)]}"
                yield _StepState(name, plain, group, parameter, loaded={})


def _state(optimizer: BoostedOptimizer) -> Iterator[tuple[str, Any]]:
    for step_state in _step_states(optimizer):
        states = step_state.optimizer.state
        # Reading an absent entry of a defaultdict would make one.
        if step_state.parameter in states:
            for field, value in states[step_state.parameter].items():
                yield f"{step_state.name}/{field}", value


def _empty(key: str, stored: Stored, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    if stored.shape == tuple(parameter.shape) and stored.shape:
        return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
    if stored.shape and isinstance(parameter, DTensor):
        raise ValueError(f"{key} has shape {list(stored.shape)}, which cannot be sharded like it")
    # torch's optimizers count their steps on the host, unless they are fused or capturable.
    counts = key.endswith("/step") and not (group.get("fused") or group.get("capturable"))
    device = torch.device("cpu") if counts else parameter.device
    return torch.empty(stored.shape, dtype=stored.dtype, device=device)


def packed(state: Mapping[str, Any]) -> bytes:
    """Return what ``torch.save`` writes of a state that is loaded without running code in it."""
    buffer = io.BytesIO()
    try:
        torch.save(_plain(state), buffer)
        buffer.seek(0)
        unknown = get_unsafe_globals_in_checkpoint(buffer)
    except Exception as error:  # what pickle raises depends on the object
        unknown = [f"{type(error).__name__}: {error}"]
    if not unknown:
        return buffer.getvalue()
    for key, part in state.items() if len(state) > 1 else ():
        packed({key: part})  # names the part
    raise ValueError(
        f"{' and '.join(state)} cannot be saved: only tensors, numbers, strings, lists and dicts "
        f"can be loaded without running code, but the state holds {first_few(unknown)}"
    )


def _plain(value: Any) -> Any:
    """Return a state with Python's numbers instead of NumPy's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


class CheckpointIO:
    """The methods of :class:`runner.Booster` for states and files, named as Colossal-AI's.

    Every rank calls them, and all ranks see the same disk. Reading a file runs no code in it. What
    was saved under one plugin and number of ranks can be loaded under another. ``size_per_shard``
    of Colossal-AI has no effect: each rank writes one file.
    """

    def state_dict(self, model: BoostedModel) -> dict[str, Tensor]:
        """Gather the state dict of the whole model on the host of the first rank."""
        whole = gathered(model.unwrap(), model.renamed)
        return {name: whole[first] for name, first in model.names.items()} if whole else {}

    def load_state_dict(
        self, model: BoostedModel, state: Mapping[str, Tensor], strict: bool = True
    ) -> None:
        """Load a state dict of the whole model, which only the first rank reads.

        A ValueError on every rank lists what is not the model's, names only if ``strict``.
        """
        load(model_slots(model), model.names, state, strict)

    def save_model(
        self,
        model: BoostedModel,
        checkpoint: str | Path,
        shard: bool = False,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
    ) -> None:
        """Save the model as one file that plain torch reads, or as a folder of shards."""
        path = Path(checkpoint)
        if shard:
            _write_folder(path, model_tensors(model))
            return
        whole = self.state_dict(model)
        save: Any = torch.save
        if use_safetensors or path.suffix == _SAFETENSORS:
            save = safetensors.torch.save_file
            # The format knows no tied tensors: each name gets its own.
            whole = {name: tensor.clone() for name, tensor in whole.items()}
        _write_file(path, lambda part: save(whole, part))

    def load_model(self, model: BoostedModel, checkpoint: str | Path, strict: bool = True) -> None:
        """Load what :meth:`save_model` saved, or the state dict of a model that was not boosted."""
        path = Path(checkpoint)
        if path.is_dir():
            slots = model_slots(model)
            source = Folder(path)
            source.fill({name: slots[name] for name in slots if strict or name in source.stored})
        else:
            state: dict[str, Any] = {}
            on_first(lambda: state.update(_read(path)))
            self.load_state_dict(model, state, strict)

    def save_optimizer(
        self, optimizer: BoostedOptimizer, checkpoint: str | Path, shard: bool = False
    ) -> None:
        """Save the state of the optimizers and of the fp16 loss scale, always as a folder."""
        _write_folder(Path(checkpoint), optimizer_tensors(optimizer), optimizer_values(optimizer))

    def load_optimizer(self, optimizer: BoostedOptimizer, checkpoint: str | Path) -> None:
        """Load what :meth:`save_optimizer` saved."""
        path = Path(checkpoint)
        source = Folder(path)
        tensors, assign = optimizer_slots(optimizer, source.stored, _read(path / _VALUES))
        source.fill(tensors)
        assign()

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Save the state of a scheduler."""
        content = packed(lr_scheduler.state_dict())
        _write_file(Path(checkpoint), lambda part: part.write_bytes(content))

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Load what :meth:`save_lr_scheduler` saved."""
        lr_scheduler.load_state_dict(_read(Path(checkpoint)))


def _write_folder(
    path: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any] | None = None
) -> None:
    """Write shards to a folder, in place of those that an earlier save has left there."""
    part = path / ".part"

    def begin() -> None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        if values is not None:
            (part / _VALUES).write_bytes(packed(values))

    def complete() -> None:
        for old_file in path.glob(f"*{_SAFETENSORS}"):
            old_file.unlink()
        for new_file in part.iterdir():
            new_file.replace(path / new_file.name)
        part.rmdir()

    on_first(begin)
    write(tensors, part)
    on_first(complete)


def _write_file(path: Path, save: Callable[[Path], object]) -> None:
    """Let the first rank write a file, beside the former one until it is complete."""
    part = path.with_name(f".{path.name}.part")

    def work() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    on_first(work)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == _SAFETENSORS:
            return dict(safetensors.torch.load_file(path))
        return dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except FileNotFoundError:
        raise
    except Exception as error:  # what torch raises depends on where the file is cut off
        raise ValueError(f"{path} is damaged, or no checkpoint: {error}") from None
