"""Plugin ``ddp``: every rank holds the whole model, and gradients are averaged over ranks.

After the backward pass of the last microbatch all ranks hold bitwise equal gradients, so clipping
needs no collective. Both forward and backward pass have to run inside ``no_sync``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from runner.booster.plugin.base import ParallelModel, Plugin, require_process_group
from runner.booster.step_order import StepOrderError
from runner.clip import Layout
from runner.parallel.final_gradients import Final, watch_buckets
from runner.parallel.gradient_sync import Replicas, average, synchronise_batch_norm

_TRAINED = attrgetter("requires_grad")


class TorchDDPPlugin(Plugin):
    """Data parallelism by :class:`torch.nn.parallel.DistributedDataParallel`.

    The arguments are those of DDP, except ``sync_batchnorm``: whether to compute batch norm over
    the samples of all ranks (:class:`torch.nn.SyncBatchNorm`, only on GPUs).

    Raises:
        RuntimeError: there is no process group.
    """

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        sync_batchnorm: bool = False,
    ) -> None:
        self.world = require_process_group("TorchDDPPlugin")
        self.sync_batchnorm = sync_batchnorm
        self.ddp_kwargs: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        if not broadcast_buffers:
            # Passed only if it differs, because newer versions of torch renamed it.
            self.ddp_kwargs["broadcast_buffers"] = False

    def configure(self, model: nn.Module) -> ParallelModel:
        """Wrap the model in DDP; every rank holds all gradients."""
        if self.sync_batchnorm:
            synchronise_batch_norm(model, self.world)
        device = next(model.parameters()).device
        ids = [device.index] if device.type == "cuda" else None
        wrapped = Replica(model, device_ids=ids, **self.ddp_kwargs)
        return ParallelModel(
            wrapped,
            Layout.of_model(model),
            sync_grads=wrapped.average_again,
            watch_final=wrapped.watch_final,
        )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's context: gradients stay local until a backward pass outside.

        With ``static_graph`` the first backward pass of a training has to average its gradients:
        PyTorch 2.14 fails under ``DDP.no_sync`` there. The sum over the window is the same.
        """
        assert isinstance(model, DistributedDataParallel)
        if model.static_graph and not model._static_graph_delay_allreduce_enqueued:
            return nullcontext()
        return model.no_sync()


class Replica(DistributedDataParallel):
    """DDP for parameters that are frozen and unfrozen, and for several backward passes of a graph.

    DDP itself averages the gradients of the parameters that were trained when it was built, in the
    first backward pass after a forward pass. It does not average those of parameters that are
    unfrozen later, nor those of a second backward pass.

    Args:
        module: the user's model.
        options: arguments of DDP.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._options = options
        self._watched = False  # whether gradients are read in the backward pass
        self._note_trained()
        self._averages = False  # whether DDP averages in the next backward pass
        self._missed = False  # whether a backward pass has run in which it did not
        self._pass = -1

    def _note_trained(self) -> None:
        self._held_parameters = list(self.module.parameters())
        self._trained = list(map(_TRAINED, self._held_parameters))
        with torch.enable_grad():
            views = [p.view_as(p).grad_fn for p in self._held_parameters if p.requires_grad]
        self._accumulators = [view.next_functions[0][0] for view in views if view is not None]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; register parameters that were frozen or unfrozen since the last pass."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        trained = list(map(_TRAINED, self._held_parameters))
        if trained != self._trained and any(trained):
            self._rebuild(trained)
        outputs = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        held = not self.require_backward_grad_sync
        self._averages = self._averages or not held
        for output in [outputs] if isinstance(outputs, Tensor) else tree_leaves(_fields(outputs)):
            if isinstance(output, Tensor) and output.requires_grad and not output.is_leaf:
                output.register_hook(self._held if held else self._reached)  # type: ignore[no-untyped-call]
        return outputs

    def _rebuild(self, trained: list[bool]) -> None:
        """Register the parameters that are trained now. Every rank has to call this."""
        if self.static_graph:
            named = zip(self.module.named_parameters(), trained, self._trained, strict=True)
            name = next(name for (name, _), now, before in named if now != before)
            raise ValueError(
                f"{name} was frozen or unfrozen after boost, but static_graph=True takes the same "
                "parameters in each step: use TorchDDPPlugin(static_graph=False)"
            )
        mode, syncs, hooks = self.training, self.require_backward_grad_sync, self._comm_hooks
        # Ranks hold the same weights, but each of them its own buffers.
        DistributedDataParallel.__init__(self, self.module, init_sync=False, **self._options)
        self.training, self.require_backward_grad_sync = mode, syncs
        for hook, state in hooks:
            self.register_comm_hook(state, hook)
        if self._watched:
            self.reducer._set_optimizer_in_backward()  # type: ignore[attr-defined]
        self._note_trained()

    def _reached(self, gradient: Tensor) -> None:
        """Note that a backward pass runs; each pass has a number."""
        self._note_pass(held=False)

    def _held(self, gradient: Tensor) -> None:
        self._note_pass(held=True)

    def _note_pass(self, held: bool) -> None:
        number = torch._C._current_graph_task_id()
        executes = torch._C._will_engine_execute_node
        # A pass of torch.autograd.grad may accumulate no gradient.
        if number == self._pass or not any(map(executes, self._accumulators)):
            return
        self._pass = number
        if self._averages:
            self._averages = False
        elif not held:
            if self._watched:
                raise StepOrderError(
                    "a second backward pass of one forward pass would change gradients that were "
                    "clipped already: with clip.when=backward a step has one backward pass outside "
                    "of no_sync"
                )
            self._missed = True

    def average_again(self) -> None:
        """Average gradients over ranks, if a backward pass has run in which DDP did not.

        Those that are averaged already are equal on all ranks, and stay as they are.
        """
        if self._missed:
            self._missed = False
            group: Any = self.process_group
            average(Replicas(self._held_parameters, group, group.size()))

    def watch_final(self, final: Final) -> None:
        """Call ``final`` with parameters whose gradients have become final in a backward pass."""
        watch_buckets(self, final)
        self._watched = True


def _fields(outputs: Any) -> Any:
    """Return the attributes of an object that holds outputs; anything else as it is."""
    plain = isinstance(outputs, tuple | list | dict) or not hasattr(outputs, "__dict__")
    return outputs if plain else vars(outputs)


PLUGIN = TorchDDPPlugin
