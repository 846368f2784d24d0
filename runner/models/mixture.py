"""A mixture of experts in the place of the MLP, and the transformer made of it.

Sources: N. Shazeer et al., Outrageously Large Neural Networks, 2017 (arXiv 1701.06538): a router
sends each token to its k best experts; A. Q. Jiang et al., Mixtral of Experts, 2024 (arXiv
2401.04088, section 2.1): the weights are a softmax over the logits of the chosen k; T. Gale et
al., MegaBlocks, 2022 (arXiv 2211.15841): dropless, which means that an expert has no capacity and
takes every token that chose it.

There is no auxiliary loss that balances the experts: it is not a mean over tokens, so one process
and many ranks, or one batch and its microbatches, would not agree on it.
"""

from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.models.gpt import GPT, MLP


class Mixture(nn.Module):
    """A router and its experts, each of them an `MLP`.

    Args:
        width: of the tokens.
        experts: how many there are, E.
        top_k: experts per token. The weights of a token add up to 1, so with one expert per token
            its weight is the constant 1 and the loss has no gradient for the router.
        bias: whether the experts' linear maps have biases; the router has none.

    Raises:
        ValueError: when ``top_k`` is below 1 or above ``experts``.
    """

    def __init__(self, width: int, experts: int, top_k: int, bias: bool) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k {top_k} is not between 1 and the {experts} experts")
        self.top_k = top_k
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(MLP(width, bias) for _ in range(experts))
        self.group: dist.ProcessGroup | None = None
        self.here = range(experts)

    def spread(self, group: dist.ProcessGroup) -> list[str]:
        """Deal the experts to the ranks of ``group``: each keeps a contiguous run, or none.

        The sizes of the runs differ by one at most. Experts that live elsewhere lose their
        parameters here (which become None); those that stay keep their names. From now on every
        forward pass, and every backward pass through what it returned, is a collective of the
        group: all ranks take part, also those with an empty batch.

        The gradient of an expert is then the sum over the tokens of all ranks of the group,
        divided by nothing; that of the router is over this rank's tokens, as without a group.

        Returns:
            The names, relative to this module, of the parameters of the experts that stay.

        Raises:
            RuntimeError: when the experts are spread already.
        """
        if self.group is not None:
            raise RuntimeError("the experts are spread over a group already")
        self.group = group
        self.here = dealt(len(self.experts), group.size())[group.rank()]
        for number, expert in enumerate(self.experts):
            if number not in self.here:
                for part in expert.modules():
                    part._parameters.update(dict.fromkeys(part._parameters))
        return [name for name, _ in self.named_parameters() if name.startswith("experts.")]

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, width] to the same shape and dtype, each position by itself.

        A token's terms are added in the order of its choices, best first, wherever they were
        computed.
        """
        rows = hidden.flatten(0, -2)
        weights, chosen = self._route(rows)
        numbers = torch.arange(len(self.experts), device=rows.device)
        counts = (chosen.unsqueeze(-1) == numbers).sum((0, 1))
        # One copy of a token per choice, then sorted by expert.
        copies = rows.unsqueeze(1).expand(-1, self.top_k, -1).flatten(0, 1)
        order = chosen.flatten().argsort(stable=True)
        inverse = order.argsort()
        rows_by_expert = _Reorder.apply(copies, order, inverse)
        if self.group is None:
            # The one wait for the device: a split needs its sizes on the host.
            answers = self._run(rows_by_expert, counts.tolist())
        else:
            answers = self._run_spread(rows_by_expert, counts, self.group)
        answers = _Reorder.apply(answers, inverse, order).view(*chosen.shape, rows.shape[1])
        mixed: Tensor = (answers * weights.unsqueeze(-1)).sum(1)
        return mixed.to(hidden.dtype).view_as(hidden)

    def _route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """For rows [N, width], the weights and the numbers of their experts, both [N, top_k].

        The softmax over the chosen logits is that over all of them, divided by its chosen part.
        It is taken in float32 or better.
        """
        logits = self.router(rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best, chosen = logits.topk(self.top_k, dim=-1)
        return best.softmax(-1), chosen

    def _run(self, rows: Tensor, counts: list[int]) -> Tensor:
        """What the experts here make of rows that are sorted by expert, ``counts`` for each.

        An expert without rows runs as well: its gradient is then zero, not missing. The result
        has the dtype of ``rows`` also under autocast, so that ranks with and without experts
        agree on what they send.
        """
        if not self.here:
            return rows
        parts = zip(self.here, torch.split(rows, counts), strict=True)
        return torch.cat([self.experts[number](part) for number, part in parts]).to(rows.dtype)

    def _run_spread(self, rows: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """What all experts make of rows sorted by expert; ``counts`` [E] are this rank's."""
        runs = dealt(len(self.experts), group.size())
        shares = [len(run) for run in runs]
        # How many rows each rank has for each expert here, told before the rows themselves.
        told = counts.new_empty(group.size() * len(self.here))
        dist.all_to_all_single(told, counts, [len(self.here)] * group.size(), shares, group=group)
        # The one wait for the device: an exchange needs its sizes on the host.
        sizes = torch.cat([counts, told]).tolist()
        mine, theirs = sizes[: len(counts)], sizes[len(counts) :]
        sent = [sum(mine[number] for number in run) for run in runs]
        by_rank = [theirs[i * len(self.here) :][: len(self.here)] for i in range(group.size())]
        received = [sum(part) for part in by_rank]
        if torch.is_grad_enabled() and not rows.requires_grad:
            # A rank joins an exchange of the backward pass only where its rows have a gradient,
            # and whether they need one must not depend on which experts live where.
            rows.requires_grad_()
        arrived = _Exchange.apply(rows, sent, received, group)
        # They come rank by rank; each expert takes its rows in one piece.
        places = torch.arange(len(self.here), device=rows.device).repeat(group.size())
        order = places.repeat_interleave(told, output_size=sum(theirs)).argsort(stable=True)
        inverse = order.argsort()
        totals = [sum(column) for column in zip(*by_rank, strict=True)]
        answers = self._run(_Reorder.apply(arrived, order, inverse), totals)
        back: Tensor = _Exchange.apply(
            _Reorder.apply(answers, inverse, order), received, sent, group
        )
        return back


def dealt(experts: int, ranks: int) -> list[range]:
    """Contiguous runs of expert numbers, one for each rank, as even as can be; some may be empty.

    >>> dealt(5, 2)
    [range(0, 2), range(2, 5)]
    """
    bounds = [experts * rank // ranks for rank in range(ranks + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


class _Reorder(torch.autograd.Function):
    """``rows[order]`` for a permutation, whose inverse is at hand.

    The gradient of plain indexing adds into its target, which is slow and, on several threads,
    in no fixed order; that of a permutation is its inverse.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _Reorder.apply(gradient, inverse, order), None, None


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of a group: ``sent[i]`` to rank i, ``received[i]`` from it, in rank order.

    The gradient goes the way back.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _Exchange.apply(gradient, received, sent, ctx.group), None, None, None


class MixtureGPT(GPT):
    """`GPT` with a `Mixture` for the MLP of every block.

    Args:
        vocabulary: number of tokens, V.
        context: longest sequence it takes.
        layers: transformer blocks.
        heads: of each attention; they divide the width.
        width: of the residual stream.
        experts: of each block.
        top_k: experts per token.
        tied: whether the head's weight is the token embedding's.
        bias: whether linear maps and normalisations have biases; head and routers have none.
        dropout: chance to drop an element of the embedding, of an attention and of a residual
            branch.

    Raises:
        ValueError: when the heads do not divide the width, or ``top_k`` is below 1 or above
            ``experts``.
    """

    tp_plan: ClassVar[dict[str, str]] = {
        **{name: way for name, way in GPT.tp_plan.items() if not name.startswith("blocks.*.mlp.")},
        "blocks.*.mlp": "whole_sequence",
        "blocks.*.mlp.experts.*.up": "colwise",
        "blocks.*.mlp.experts.*.down": "rowwise",
    }

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        experts: int,
        top_k: int,
        tied: bool,
        bias: bool,
        dropout: float,
    ) -> None:
        super().__init__(
            vocabulary=vocabulary,
            context=context,
            layers=layers,
            heads=heads,
            width=width,
            tied=tied,
            bias=bias,
            dropout=dropout,
            feed_forward=partial(Mixture, experts=experts, top_k=top_k),
        )
