"""Ranks without gradients, parameters on several meshes, partial sums, and replicas that drift."""

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from runner.clip import GradStats, Layout, build, total_norm
from runner.clip.shard import local
from tests.distributed.by_hand import NORM, Loop, assert_one_process
from tests.distributed.odd_models import BATCH, SHAPE, batch_for, make
from tests.ranks import run_ranks

# -- ranks and parameters without gradients

EVERY_MODE = [NORM, ("norm", 0.01, float("inf")), ("value", 0.001, 2.0), ("adaptive", 0.01, 2.0)]
FROZEN = {
    "first_frozen": ["1f1b", "gpipe", "interleaved", "zero_bubble"],
    "second_frozen": ["1f1b", "gpipe", "interleaved", "zero_bubble"],
    "adapter": ["1f1b", "fsdp", "zero1", "tensor", "ddp", "data"],
}


@pytest.mark.parametrize("model", FROZEN)
def test_frozen_stages_and_adapters(model):
    asked = [
        {"model": model, "plugin": plugin, "clip": clip}
        for plugin in FROZEN[model]
        for clip in (EVERY_MODE if plugin == "1f1b" else [NORM])
    ]
    ranks = assert_one_process(2, asked)
    assert all(rank[0]["figures"][0] > 0 for rank in ranks)
    # The test needs a rank that has nothing to add: under the first plugin, one of the two.
    without = {"first_frozen": 0, "second_frozen": 1}
    if model in without:
        assert [rank[0]["present"] == 0 for rank in ranks].index(True) == without[model]
    if model == "adapter":
        assert [rank[0]["present"] for rank in ranks] == [2, 0]


@pytest.mark.slow
def test_an_expert_that_no_token_chose():
    asked = [
        {"model": "unrouted", "plugin": plugin, "clip": clip}
        for plugin in ("moe", "zero3")
        for clip in (NORM, ("adaptive", 0.01, 2.0))
    ]
    ranks = assert_one_process(2, asked)
    unused = [g for n, g in ranks[0][0]["gradients"].items() if ".experts.4." in n]
    assert unused, "the test needs an expert without tokens"
    assert all(not gradient.any() for gradient in unused)


def test_a_branch_that_one_data_part_takes():
    asked = [
        {"model": "forked", "plugin": plugin, "clip": clip}
        for plugin in ("data", "zero1", "fsdp", "zero2")
        for clip in EVERY_MODE
    ]
    assert_one_process(2, asked)


# -- meshes, mixtures of tensors, partial sums


def test_a_plan_for_some_modules():
    asked = [{"model": "gpt", "plugin": "some_split", "clip": clip} for clip in EVERY_MODE]
    assert_one_process(2, asked)


PLACED = {
    "plain": ((5, 3), None),
    "rows": ((6, 3), ("a", [Shard(0)])),
    "columns": ((3, 5), ("b", [Shard(1)])),
    "vector": ((7,), ("b", [Shard(0)])),
    "both": ((4, 6), ("ab", [Shard(1), Shard(0)])),
    "twice": ((9, 2), ("ab", [Shard(0), Shard(0)])),
    "vector_twice": ((10,), ("ab", [Shard(0), Shard(0)])),
    "repeated": ((4,), ("ab", [Replicate(), Replicate()])),
    "columns_twice": ((2, 8), ("ab", [Shard(1), Shard(1)])),
    "few": ((3,), ("all", [Shard(0)])),
}


def everything():
    """Weights and gradients of PLACED, whole."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: (
            torch.randn(shape, generator=generator, dtype=torch.float64),
            torch.randn(shape, generator=generator, dtype=torch.float64),
        )
        for name, (shape, _) in PLACED.items()
    }


def figures_of(layout, clip):
    name, threshold, norm_type = clip
    options = {"exclude": ()} if name == "adaptive" else {}
    mode = build(name, threshold=threshold, norm_type=norm_type, **options)
    mode.bind(layout)
    return [float(f) for f in mode.clip(layout).metrics]


MESH_MODES = [("norm", 1.5, 2.0), ("norm", 0.5, float("inf")), ("norm", 2.0, 1.0)]
MESH_MODES += [("value", 0.4, 2.0), ("adaptive", 0.3, 2.0)]


def on_meshes():
    """Clip parameters on four meshes of one world, and one without a mesh.

    Returns:
        For each mode the metrics of this rank, those of one process, and the names of parameters
        whose shard differs from that of the whole clipped gradient.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    meshes = {"a": grid["a"], "b": grid["b"], "ab": grid}
    meshes["all"] = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))

    def part(name, tensor):
        where = PLACED[name][1]
        if where is None:
            return tensor
        return distribute_tensor(tensor, meshes[where[0]], where[1], src_data_rank=None)

    found = []
    for clip in MESH_MODES:
        whole, model = nn.ParameterDict(), nn.ParameterDict()
        for name, (weight, gradient) in everything().items():
            whole[name], model[name] = nn.Parameter(weight), nn.Parameter(part(name, weight))
            whole[name].grad, model[name].grad = gradient, part(name, gradient.clone())
        model["frozen"] = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        assert dist.group.WORLD is not None
        ours = figures_of(Layout.of_sharded(model, dist.group.WORLD), clip)
        wanted = figures_of(Layout.of_model(whole), clip)
        unlike = [
            name
            for name in PLACED
            if not torch.allclose(
                local(model[name].grad), local(part(name, whole[name].grad)), rtol=1e-12, atol=0
            )
        ]
        found.append((ours, wanted, unlike))
    return found


def test_several_meshes_and_plain_tensors_in_one_layout():
    ranks = run_ranks(on_meshes, 4)
    for rank in ranks:
        for number, (ours, wanted, unlike) in enumerate(rank):
            clip = MESH_MODES[number]
            assert wanted[3] == 1.0, "nothing was clipped: the comparison says nothing"
            assert [f.hex() for f in ours] == [f.hex() for f in ranks[0][number][0]]
            assert ours == pytest.approx(wanted, rel=1e-12), clip
            assert unlike == [], clip


def partial_sums():
    """Return placements of gradients before and after synchronisation, and clipping's error."""
    loop = Loop("sequence", make("gpt"))
    loop.backward(*batch_for("gpt"))

    def partial():
        return [
            name
            for name, p in loop.raw.named_parameters()
            if isinstance(p.grad, DTensor) and any(x.is_partial() for x in p.grad.placements)
        ]

    before = partial()
    loop.optimizer.clip_grad_by_norm(0.1)
    resolved = partial()

    assert dist.group.WORLD is not None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(3, 2)
    for name, parameter in list(model.named_parameters()):
        spread = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()]))
        placement = Partial() if name == "bias" else Replicate()
        spread.grad = DTensor.from_local(torch.ones(parameter.shape), mesh, [placement])
        setattr(model, name, spread)
    layout = Layout.of_sharded(model, dist.group.WORLD)
    said = []
    for mode in ("norm", "value", "adaptive"):
        with pytest.raises(TypeError, match="bias has a gradient that its ranks") as error:
            build(mode, threshold=0.1).clip(layout, GradStats(1.0, True))
        said.append(str(error.value))
    with pytest.raises(TypeError, match="bias has a gradient that its ranks"):
        total_norm(layout)
    return before, resolved, said


def test_partial_sums_are_added_up_or_refused():
    for before, resolved, said in run_ranks(partial_sums, 2):
        # What works on a part of the sequence: norms, and the biases of row-wise layers.
        assert "norm.weight" in before
        assert "blocks.0.mlp.down.bias" in before
        assert resolved == []
        assert len(said) == 3


# -- drift


def trained(plugin, steps):
    """Return the norms of ``steps`` steps, and digests of the dense parameters of every rank."""
    loop = Loop(plugin, make("moe", torch.float32))
    start = {n: p.detach().clone() for n, p in loop.raw.named_parameters() if ".experts." not in n}
    generator = torch.Generator().manual_seed(2)
    norms = []
    for _ in range(steps):
        drawn = torch.randint(SHAPE["vocabulary"], (2, BATCH, 12), generator=generator)
        loop.backward(drawn[0], drawn[1])
        norms.append(float(loop.clip(("norm", 0.2, 2.0)).norm).hex())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    dense = {n: p.detach() for n, p in loop.raw.named_parameters() if ".experts." not in n}
    moved = [name for name, p in dense.items() if not torch.equal(p, start[name])]
    digests = {n: hashlib.sha256(p.numpy().tobytes()).hexdigest() for n, p in dense.items()}
    return norms, digests, moved


@pytest.mark.parametrize(("plugin", "world"), [("moe", 2), ("moe_dp", 4), ("moe_zero1", 4)])
def test_dense_parameters_do_not_drift_between_ranks_with_other_experts(plugin, world):
    ranks = run_ranks(trained, world, plugin, 20)
    norms, digests, moved = ranks[0]
    assert len(set(norms)) == 20
    assert any("router" in name for name in moved)
    for rank in ranks[1:]:
        assert rank[0] == norms
        assert rank[1] == digests
