"""A mixture-of-experts layer, and a transformer with this layer in place of its MLPs.

Sources: N. Shazeer et al., Outrageously Large Neural Networks, 2017 (arXiv 1701.06538): a router
sends each token to its k best experts; A. Q. Jiang et al., Mixtral of Experts, 2024 (arXiv
2401.04088, section 2.1): the weights are a softmax over the logits of these k; T. Gale et al.,
MegaBlocks, 2022 (arXiv 2211.15841): dropless, an expert takes every token that is routed to it.

There is no auxiliary loss that balances the experts: such a loss is not a mean over tokens, so it
would depend on how a batch is split into microbatches and over ranks.
"""

from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.config.problem import ArgumentError
from runner.models.gpt import GPT, MLP


class Mixture(nn.Module):
    """A router and its experts, each of them an `MLP`."""

    def __init__(self, width: int, experts: int, top_k: int, bias: bool) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ArgumentError("top_k", f"{top_k} is not between 1 and the {experts} experts")
        self.top_k = top_k
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(MLP(width, bias) for _ in range(experts))
        self.group: dist.ProcessGroup | None = None
        self.here = range(experts)

    def spread(self, group: dist.ProcessGroup) -> list[str]:
        """Distribute the experts over the ranks of ``group``: each keeps a contiguous range."""
        if self.group is not None:
            raise RuntimeError("the experts are spread over a group already")
        self.group = group
        self.here = partitioned(len(self.experts), group.size())[group.rank()]
        for number, expert in enumerate(self.experts):
            if number not in self.here:
                for part in expert.modules():
                    part._parameters.update(dict.fromkeys(part._parameters))
        return [name for name, _ in self.named_parameters() if name.startswith("experts.")]

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape and dtype, position by position."""
        rows = hidden.flatten(0, -2)
        logits = self.router(rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best, chosen = logits.topk(self.top_k, dim=-1)  # each [N, top_k]
        numbers = torch.arange(len(self.experts), device=rows.device)
        counts = (chosen.unsqueeze(-1) == numbers).sum((0, 1))
        # One copy of a token per choice, then sorted by expert.
        copies = rows.unsqueeze(1).expand(-1, self.top_k, -1).flatten(0, 1)
        order = chosen.flatten().argsort(stable=True)
        inverse = order.argsort()
        rows_by_expert = _Reorder.apply(copies, order, inverse)
        if self.group is None:
            # The only host synchronisation: a split needs its sizes on the host.
            answers = self._run(rows_by_expert, counts.tolist())
        else:
            answers = self._run_spread(rows_by_expert, counts, self.group)
        answers = _Reorder.apply(answers, inverse, order).view(*chosen.shape, rows.shape[1])
        mixed: Tensor = (answers * best.softmax(-1).unsqueeze(-1)).sum(1)
        return mixed.to(hidden.dtype).view_as(hidden)

    def _run(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Apply the local experts to rows that are sorted by expert, ``counts`` rows for each."""
        if not self.here:
            return rows
        parts = zip(self.here, torch.split(rows, counts), strict=True)
        return torch.cat([self.experts[number](part) for number, part in parts]).to(rows.dtype)

    # torch cannot trace an exchange whose sizes come from the host.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_spread(self, rows: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Apply the experts of all ranks to rows sorted by expert, ``counts`` [E] rows for each."""
        runs = partitioned(len(self.experts), group.size())
        shares = [len(run) for run in runs]
        # The number of rows that each rank has for each local expert travels before the rows.
        incoming = counts.new_empty(group.size() * len(self.here))
        sizes_here = [len(self.here)] * group.size()
        dist.all_to_all_single(incoming, counts, sizes_here, shares, group=group)
        # The only host synchronisation: an exchange needs its sizes on the host.
        sizes = torch.cat([counts, incoming]).tolist()
        mine = sizes[: len(counts)]
        theirs = sizes[len(counts) :]
        sent = [sum(mine[number] for number in run) for run in runs]
        by_rank = [theirs[i * len(self.here) :][: len(self.here)] for i in range(group.size())]
        received = [sum(part) for part in by_rank]
        if torch.is_grad_enabled() and not rows.requires_grad:
            # A rank takes part in the exchange of the backward pass only if its rows require a
            # gradient, which must not depend on where experts are.
            rows.requires_grad_()
        arrived = _Exchange.apply(rows, sent, received, group)
        # Rows arrive in the order of ranks; each expert takes its rows in one piece.
        places = torch.arange(len(self.here), device=rows.device).repeat(group.size())
        order = places.repeat_interleave(incoming, output_size=sum(theirs)).argsort(stable=True)
        inverse = order.argsort()
        totals = [sum(column) for column in zip(*by_rank, strict=True)]
        answers = self._run(_Reorder.apply(arrived, order, inverse), totals)
        back: Tensor = _Exchange.apply(
            _Reorder.apply(answers, inverse, order), received, sent, group
        )
        return back


def partitioned(experts: int, ranks: int) -> list[range]:
    """Return contiguous ranges of expert numbers, one per rank, of about equal sizes."""
    bounds = [experts * rank // ranks for rank in range(ranks + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


class _Reorder(torch.autograd.Function):
    """``rows[order]`` for a permutation whose inverse is known."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _Reorder.apply(gradient, inverse, order), None, None


class _Exchange(torch.autograd.Function):
    """Send ``sent[i]`` rows to rank i of a group and receive ``received[i]`` rows from it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes = (sent, received)
        ctx.group = group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _Exchange.apply(gradient, received, sent, ctx.group), None, None, None


class MixtureGPT(GPT):
    """`GPT` with a `Mixture` for the MLP of every block."""

    tp_plan: ClassVar[dict[str, str]] = {
        **{name: way for name, way in GPT.tp_plan.items() if not name.startswith("blocks.*.mlp.")},
        "blocks.*.mlp": "whole_sequence",
        "blocks.*.mlp.experts.*.up": "colwise",
        "blocks.*.mlp.experts.*.down": "rowwise",
    }

    def __init__(self, experts: int, top_k: int, **options: Any) -> None:
        """Make the model; ``options`` are the arguments of :class:`GPT`."""

        def mixture(width: int, bias: bool) -> Mixture:
            return Mixture(width=width, experts=experts, top_k=top_k, bias=bias)

        super().__init__(**options, feed_forward=mixture)
