"""Plugin ``ddp``: every rank holds the whole model, and trains on its part of the samples.

After the backward pass of the last microbatch all ranks hold bitwise equal gradients, so clipping
needs no collective.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.booster.plugin import base
from runner.clip import Layout
from runner.parallel import gradient_sync as sync
from runner.parallel.hooks import held_tensors


class TorchDDPPlugin(base.Plugin):
    """Data parallelism by :class:`torch.nn.parallel.DistributedDataParallel`.

    The arguments are those of DDP, except ``sync_batchnorm``: whether to compute batch norm over
    the samples of all ranks (:class:`torch.nn.SyncBatchNorm`, only on GPUs). ``static_graph`` means
    ``find_unused_parameters``, because PyTorch 2.14 fails under ``no_sync`` of a static graph. Both
    forward and backward pass have to run inside ``no_sync``.

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
        self.world = base.require_process_group("TorchDDPPlugin")
        self.sync_batchnorm = sync_batchnorm
        self.ddp_kwargs: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters or static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        if not broadcast_buffers:
            # Passed only if it differs, because newer versions of torch renamed it.
            self.ddp_kwargs["broadcast_buffers"] = False

    def configure(self, model: nn.Module) -> base.ParallelModel:
        """Wrap the model in DDP; every rank holds all gradients."""
        if self.sync_batchnorm:
            sync.synchronise_batch_norm(model, self.world)
        device = next(model.parameters()).device
        ids = [device.index] if device.type == "cuda" else None
        wrapped = Replica(model, device_ids=ids, **self.ddp_kwargs)
        return base.ParallelModel(wrapped, Layout.of_model(model), sync_grads=wrapped.average_again)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's context: gradients stay local until a backward pass outside."""
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync()


class Replica(DistributedDataParallel):
    """DDP for parameters that are frozen and unfrozen, and for several backward passes of a graph.

    DDP itself averages the gradients of the parameters that were trained when it was built, in the
    first backward pass after a forward pass.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._options = options
        self._note_trained()
        self._averages = False  # whether DDP averages in the next backward pass
        self._missed = False  # whether a backward pass has run in which it did not
        self._pass = -1

    def _note_trained(self) -> None:
        self._held_parameters = list(self.module.parameters())
        self._trained = [p.requires_grad for p in self._held_parameters]
        with torch.enable_grad():
            views = [p.view_as(p).grad_fn for p in self._held_parameters if p.requires_grad]
        self._accumulators = [view.next_functions[0][0] for view in views if view is not None]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; register parameters that were frozen or unfrozen since the last pass."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        trained = [p.requires_grad for p in self._held_parameters]
        held = not self.require_backward_grad_sync
        if trained != self._trained and any(trained):
            # Ranks hold the same weights, but each of them its own buffers.
            mode, hooks = self.training, self._comm_hooks
            DistributedDataParallel.__init__(self, self.module, init_sync=False, **self._options)
            self.training, self.require_backward_grad_sync = mode, not held
            for hook, state in hooks:
                self.register_comm_hook(state, hook)
            self._note_trained()
        outputs = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._averages = self._averages or not held
        for output in held_tensors(outputs):
            if output.requires_grad and not output.is_leaf:
                output.register_hook(partial(self._note_pass, held))  # type: ignore[no-untyped-call]
        return outputs

    def _note_pass(self, held: bool, gradient: Tensor) -> None:
        """Note that a backward pass runs; each pass has a number."""
        number = torch._C._current_graph_task_id()
        executes = torch._C._will_engine_execute_node
        # A pass of torch.autograd.grad may accumulate no gradient.
        if number == self._pass or not any(map(executes, self._accumulators)):
            return
        self._pass = number
        self._missed = self._missed or not (self._averages or held)
        self._averages = False

    def average_again(self) -> None:
        """Average gradients over ranks, if a backward pass has run in which DDP did not.

        Those that are averaged already are equal on all ranks, and stay as they are.
        """
        if self._missed:
            self._missed = False
            group: Any = self.process_group
            sync.average(sync.Replicas(self._held_parameters, group, group.size()))
