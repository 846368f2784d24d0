"""Windows of microbatches, right ones and with planted faults: the report of each."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from runner.check import AccumulationCheck, check_accumulation
from tests.check.models import fully_shard, net, scripts

FULL = 4
SIZES = (5, 2, 3, 6)


def window(sizes=SIZES):
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for size in sizes:
        inputs = torch.randn(size + rank, 6, generator=generator)
        batches.append((inputs, torch.randint(4, (size + rank,), generator=generator)))
    return batches


def loss(model, batch):
    inputs, targets = batch
    return cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


def items_of(batches):
    total = torch.tensor(float(sum(len(targets) for _, targets in batches)))
    dist.all_reduce(total)
    return float(total)


def _ddp():
    return DistributedDataParallel(net())


def train(model, batches, *, divide, quiet=True, clear=False):
    """Run a window; ``divide`` is given the sum of losses, the items and the window."""
    for number, batch in enumerate(batches, 1):
        last = number == len(batches)
        if clear:
            model.zero_grad()
        sends = last or not quiet
        is_ddp = isinstance(model, DistributedDataParallel)
        with nullcontext() if sends or not is_ddp else model.no_sync():
            losses, items = loss(model, batch)
            divide(losses, items, batches).backward()


def by_all_items(losses, items, batches):
    return losses * dist.get_world_size() / items_of(batches)


def by_own_items_and(count):
    return lambda losses, items, batches: losses / items / (count or len(batches))


def checked(divide, sizes=SIZES, model=None, **options):
    model = _ddp() if model is None else model
    batches = window(sizes)

    def step(given):
        train(model, given, divide=divide, **options)

    return check_accumulation(step, batches, model=model, loss=loss, steps=FULL).report()


def right():
    return checked(by_all_items), "check_accumulation: right|gradients were sent after 1 of them"


def right_under_fsdp():
    model = fully_shard(net())
    return checked(by_all_items, model=model), "check_accumulation: right"


def right_with_a_step():
    """The optimizer steps in the window, and the weights stay those after the step."""
    model = _ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    batches = window()

    def step(given):
        train(model, given, divide=by_all_items)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    check = check_accumulation(step, batches, model=model, loss=loss, scheduler=scheduler)
    return check.report(), "check_accumulation: right"


def right_with_dropout():
    model = net()
    model.append(nn.Dropout(0.5))
    return checked(by_all_items, model=DistributedDataParallel(model)), "right"


def mean_of_means():
    return checked(by_own_items_and(None)), "1 fault|a mean of means|5, 2, 3, 6 on rank 0"


def mean_of_means_under_fsdp():
    return checked(by_own_items_and(None), model=fully_shard(net())), "a mean of means"


def items_of_this_rank_alone():
    def divide(losses, items, batches):
        return losses / sum(len(targets) for _, targets in batches)

    return checked(divide), "each rank divides by its own items"


def full_window_in_a_short_one():
    def divide(losses, items, batches):
        return by_all_items(losses, items, batches) * len(batches) / FULL

    words = "0.75 times what it should be: divided by the full window of 4 microbatches"
    return checked(divide, SIZES[:3]), words


def full_window_and_mean_of_means():
    return (
        checked(by_own_items_and(FULL), SIZES[:3]),
        "a mean of means|0.75 times what it should be: divided by the full window of 4",
    )


def not_divided():
    def divide(losses, items, batches):
        return by_all_items(losses, items, batches) * len(batches)

    return checked(divide), "4 times what it should be: not divided by the number of microbatches"


def no_sync_is_missing():
    return (
        checked(by_all_items, quiet=False),
        "gradients were sent 4 times for 4 microbatches: no_sync() is missing",
    )


def zeroed_between():
    return checked(by_own_items_and(1), clear=True), "only the last microbatch counts"


def not_zeroed_before():
    model = _ddp()
    train(model, window((4, 4)), divide=by_all_items)
    return checked(by_all_items, model=model), "zero_grad() is missing"


def scheduler_per_microbatch():
    model = _ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    optimizer.step()  # before the window: torch warns otherwise
    optimizer.zero_grad()
    batches = window()
    with AccumulationCheck(model, loss, scheduler=scheduler) as check:
        for number, batch in enumerate(batches, 1):
            check.batch(batch)
            with nullcontext() if number == len(batches) else model.no_sync():
                losses, items = loss(model, batch)
                by_all_items(losses, items, batches).backward()
            scheduler.step()
    return check.report(), "1 fault|the scheduler was stepped 4 times: once per microbatch"


def optimizer_per_microbatch():
    model = _ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batches):
        for batch in batches:
            optimizer.zero_grad()
            train(model, [batch], divide=by_own_items_and(1))
            optimizer.step()

    report = check_accumulation(step, window(), model=model, loss=loss).report()
    return report, "the optimizer was stepped 4 times: once per microbatch"


WINDOWS = scripts(globals())
