"""Parameters that ranks do not share, in a loop of one's own: experts and pipeline stages.

Each rank holds experts, or a stage, that the others have not. The reference is one process with all
of them, in float64.
"""

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from runner import GradientMonitor, apply_gradient_clipping, check_clipping
from runner.gradients.shard import LayoutError, local
from tests.clip.reference import refused
from tests.ranks import run_ranks

LINK = {"mode": "norm", "threshold": 1.0}
MODES = {
    "norm": (1.0, {}),
    "value": (0.3, {}),
    "adaptive": (0.2, {"exclude": ["gate.weight"]}),
    "per_parameter": (0.6, {}),
    "percentile": (30.0, {"min_steps": 1}),
    "zscore": (0.2, {"warmup_steps": 1}),
    "adagc": (0.5, {"warmup_steps": 1}),
    "schedule": (1.0, {"warmup_steps": 1}),
    "chain": (
        None,
        {"links": [{"mode": "value", "threshold": 0.4}, {"mode": "norm", "threshold": 1.0}]},
    ),
    "groups": (None, {"groups": {"experts.*": {"mode": "norm", "threshold": 0.7}}}),
}
STEPS = 3


class Model(nn.Module):
    """A gate that all ranks share, and experts that they do not."""

    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(6, 8, dtype=torch.float64)
        self.experts = experts


def expert(number):
    torch.manual_seed(100 + number)
    return nn.Sequential(nn.Linear(8, 5, dtype=torch.float64), nn.LayerNorm(5, dtype=torch.float64))


def gradient(name, number, step, shape):
    """Gradient of a parameter of an expert; number -1: of one that all ranks share."""
    generator = torch.Generator().manual_seed(hash_of(name) + 1000 * number + 7 * step)
    return 3.0**step * torch.randn(shape, generator=generator, dtype=torch.float64)


def hash_of(text):
    return sum((i + 1) * ord(letter) for i, letter in enumerate(text)) % 997 + 5000


def full_model(numbers):
    """The model of one process: an expert under the name that the layout of ranks gives it."""
    return Model(nn.ModuleDict({str(number): expert(number) for number in numbers}))


def set_gradients(model, number, step):
    """Give a rank, or one process, the gradients of a step."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, parameter in model.named_parameters():
        expert = -1 if name.startswith("gate") else number
        base = name
        if expert is None:
            _, expert, base = name.split(".", 2)
            expert = int(expert)
            base = f"experts.{base}"
        whole = gradient(base, expert, step, parameter.shape)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            places = parameter.placements
            parameter.grad = distribute_tensor(whole, mesh, places, src_data_rank=None)
        else:
            parameter.grad = whole


def rank_model(kind, number, meshes):
    """What a rank makes of the gate and its own expert."""
    from torch.distributed.fsdp import fully_shard

    model = Model(expert(number))
    ignored = set(model.experts.parameters())
    if kind == "ignored":
        return fully_shard(model, ignored_params=ignored)
    if kind == "sharded experts":  # over the ranks that hold the same expert
        fully_shard(model.experts, mesh=meshes["replicas"])
        return fully_shard(model, ignored_params=set(model.experts.parameters()))
    if kind == "ddp":
        names = [f"experts.{name}" for name, _ in model.experts.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        return DistributedDataParallel(model)
    return model


def clips(model, number, meshes, name, world_of_expert):
    threshold, options = MODES[name]
    groups = {"experts.*": meshes["experts"].get_group()}
    results = []
    for step in range(STEPS):
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        set_gradients(inner, number, step)
        decision = apply_gradient_clipping(model, name, threshold, process_groups=groups, **options)
        results.append([float(metric) for metric in decision.metrics])
    squares = Counter()
    for base, parameter in inner.named_parameters():
        copies = dist.get_world_size() if base.startswith("gate") else world_of_expert
        shard = local(parameter.grad)
        if shard is not parameter.grad:
            copies = copies // parameter.device_mesh.size()
        owner = "gate" if base.startswith("gate") else number
        squares[owner] += float(shard.square().sum()) / copies
    return results, dict(squares)


def on_ranks(kinds):
    """Clip by each mode, by a rank's own experts: what is clipped by kind and mode."""
    world = dist.get_world_size()
    results = {}
    for kind, experts in kinds:
        # Ranks 0, 1 hold experts 0 and 1, ranks 2, 3 the same again, where there are two experts.
        sizes = (world // experts, experts)
        meshes = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "experts"))
        number = dist.get_rank() % experts
        for name in MODES:
            model = rank_model(kind, number, meshes)
            results[kind, name] = clips(model, number, meshes, name, world // experts)
    return results


def one_process(experts, name):
    threshold, options = MODES[name]
    model = full_model(range(experts))
    results = []
    for step in range(STEPS):
        set_gradients(model, None, step)
        decision = apply_gradient_clipping(model, name, threshold, **options)
        results.append([float(metric) for metric in decision.metrics])
    squares = Counter()
    for base, parameter in model.named_parameters():
        owner = "gate" if base.startswith("gate") else int(base.split(".")[1])
        squares[owner] += float(parameter.grad.square().sum())
    return results, squares


def by_hand(experts, step):
    """The norm of a step: each expert and the gate once."""
    model = full_model(range(experts))
    set_gradients(model, None, step)
    return math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))


def require_one_process(kind, ranks, experts):
    for name in MODES:
        expected, squares = one_process(experts, name)
        assert any(metrics[3] for metrics in expected), (name, "clips")
        together = Counter()
        for results, shares in (rank[kind, name] for rank in ranks):
            for step, first in zip(results, ranks[0][kind, name][0], strict=True):
                assert [metric.hex() for metric in step] == [metric.hex() for metric in first]
            together.update(shares)
            for step, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
                assert ours[0] == pytest.approx(by_hand(experts, step), rel=1e-12)
                assert ours == pytest.approx(theirs, rel=1e-12, nan_ok=True), (kind, name)
        assert dict(together) == pytest.approx(dict(squares), rel=1e-12), (kind, name)


KINDS = {2: [("ignored", 2), ("ddp", 2)], 4: [("sharded experts", 2), ("plain", 4)]}
"""By ranks, how a model is split, and its experts."""


@pytest.mark.parametrize("world", KINDS)
def test_experts_of_each_rank_count_once_by_every_mode(world):
    ranks = run_ranks(on_ranks, world, KINDS[world])
    for kind, experts in KINDS[world]:
        require_one_process(kind, ranks, experts)


def refusals():
    """Experts that differ, and wrong groups, are refused on every rank."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    meshes = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicas", "experts"))
    groups = {"experts.*": meshes["experts"]}
    for kind in ("ignored", "ddp"):
        model = rank_model(kind, rank, meshes)
        set_gradients(getattr(model, "module", model), rank, 0)
        words = 'experts.0.weight, experts.0.bias: |different values|groups={"experts.'
        refused(LayoutError, words, apply_gradient_clipping, model, "norm", 1.0)
        refused(LayoutError, words, GradientMonitor(model).step)
        equal = rank_model(kind, 0, meshes)  # the same weights, as of one seed on all ranks
        inner = getattr(equal, "module", equal)
        set_gradients(inner, rank, 0)
        words = "different gradients|average them"
        refused(LayoutError, words, apply_gradient_clipping, equal, "norm", 1.0)
        set_gradients(inner, 0, 0)
        assert apply_gradient_clipping(equal, "norm", 1.0).norm > 0  # replicas
    plain = rank_model("plain", rank, meshes)
    call = apply_gradient_clipping
    stage = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
    for words, target, option in (
        ("matches no parameter", plain, {"*.bias.*": meshes["experts"]}),
        ("give the model", list(plain.parameters()), groups),
        ("has no option groups", plain, {"experts.*": {"mode": "none"}}),
        ("'world' for 'experts.*'|is a str|process group", plain, {"experts.*": "world"}),
        ("some ranks hold no such", stage, {"*0.weight": meshes["experts"]}),
    ):
        refused(ValueError, words, call, target, "norm", 1.0, groups=option)
    set_gradients(plain, rank, 0)
    marked = rank_model("plain", rank, meshes)
    marked.experts[0].weight.allreduce = False  # as libraries mark an expert
    refused(LayoutError, "experts.0.weight: marked", call, marked, "norm", 1.0)
    refused(ValueError, "head of the model", call, plain, "adaptive", 1.0, groups=groups)


def test_experts_whose_groups_are_not_given_right_are_refused():
    run_ranks(refusals, 2)  # asserts on each rank


def monitored():
    """The rows of a monitor of a model with experts, on each rank."""
    rank = dist.get_rank()
    sizes = (1, dist.get_world_size())
    meshes = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "experts"))
    model = rank_model("plain", rank, meshes)
    set_gradients(model, rank, 0)
    rows = []
    groups = {"experts.*": meshes["experts"]}
    with GradientMonitor(model, rows.append, groups=groups) as monitor:
        monitor.step()
    return rows


def test_a_monitor_takes_groups_of_experts():
    [row], no_rows = run_ranks(monitored, 2)
    assert row["grad/norm"] == pytest.approx(by_hand(2, 0), rel=1e-12)
    assert no_rows == []


def later():
    """Experts of a sharded model that have a gradient, or are trained, after the first call."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    meshes = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicas", "experts"))
    for is_frozen in (False, True):
        for number in (0, rank) if is_frozen else (0,):  # equal weights, or those of each rank
            model = rank_model("ignored", number, meshes)
            set_gradients(model, rank, 0)
            for parameter in model.experts.parameters():
                parameter.grad = None
                parameter.requires_grad_(not is_frozen)
            assert apply_gradient_clipping(model, "norm", 1e9).norm > 0
            model.experts.requires_grad_(True)
            set_gradients(model, rank, 0)
            words = "experts.0.weight|groups="
            refused(LayoutError, words, apply_gradient_clipping, model, "norm", 1.0)


def test_experts_are_compared_again_when_they_have_gradients_for_the_first_time():
    run_ranks(later, 2)


def stages():
    """The norm of a model whose stages lie on a rank each, beside replicas of all stages."""
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stages"))
    stage = dist.get_rank() % 2
    results = []
    for name in ("layer", f"layer{stage}"):
        layer = nn.Linear(3, 3, dtype=torch.float64)
        for number, parameter in enumerate(layer.parameters()):
            parameter.detach().fill_(stage)
            parameter.grad = gradient(str(number), stage, 0, parameter.shape)
        model = nn.ModuleDict({name: layer})
        decision = apply_gradient_clipping(model, "norm", 1.0, groups={"*": meshes["stages"]})
        squares = [float(parameter.grad.square().sum()) for parameter in layer.parameters()]
        results.append((float(decision.norm), sum(squares)))
    name = "head" if stage else "embed"
    tied = nn.ModuleDict({name: nn.Linear(3, 3, bias=False), f"layer{stage}": nn.Linear(3, 3)})
    tied[name].weight.detach().fill_(1.0)
    for parameter in tied.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + stage)
    tied[name].weight.grad.fill_(3.0)  # added up over both stages
    words = "embed.weight on rank 0 and head.weight on rank 1|counts once|one name on all ranks"
    stages_of_rank = {"*": meshes["stages"]}
    refused(LayoutError, words, apply_gradient_clipping, tied, "norm", 1.0, groups=stages_of_rank)
    with check_clipping(tied, math.inf, groups=stages_of_rank) as check:
        pass
    assert check.norm == pytest.approx(math.sqrt(9 * 9 + 12 * 1 + 12 * 4), rel=1e-12)
    return results


def test_stages_of_ones_own_are_one_model_whether_or_not_their_names_are_the_same():
    ranks = run_ranks(stages, 4)
    shapes = [(number, stage) for number in (0, 1) for stage in (0, 1)]
    every = [gradient(str(n), stage, 0, (3, 3) if n == 0 else (3,)) for n, stage in shapes]
    norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in every))
    for first, second, *further in zip(*ranks, strict=True):
        assert {rank[0].hex() for rank in (first, second, *further)} == {first[0].hex()}
        assert first[0] == pytest.approx(norm, rel=1e-12)
        assert first[1] + second[1] == pytest.approx(1.0, rel=1e-12)
