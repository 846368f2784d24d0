"""What two runs must have left alike, if one of them was killed and continued."""

import torch
from safetensors.torch import load_file

from tests.launch.ends import read, rows_of

TIMES = ("time/step_s", "throughput/samples_per_s", "wall_s", "git")


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def assert_alike(run, wanted):
    """Rows, summary, weights, tensors of optimizers, counts and random states, bit for bit."""
    assert rows_of(run) == rows_of(wanted)
    assert (run / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert without_times(read(run, "summary.json")) == without_times(read(wanted, "summary.json"))
    names = sorted(path.name for path in (wanted / "checkpoints").iterdir() if path.name[0] != ".")
    newest = [name for name in names if name.startswith("step_")][-1:]
    for name in ("final", *newest):
        assert_same_checkpoint(run / "checkpoints" / name, wanted / "checkpoints" / name)


def assert_same_checkpoint(one, other):
    assert parts_of(one) == parts_of(other)
    if (other / "state.pt").exists():
        states = [
            torch.load(checkpoint / "state.pt", weights_only=True) for checkpoint in (one, other)
        ]
        for key in ("progress", "clip", "schedulers", "random", "optimizers"):
            same(states[0][key], states[1][key])


def parts_of(checkpoint):
    """Each part of a tensor with its bits: which rank writes a replica is not determined."""
    parts = []
    for file in checkpoint.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            bits = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            parts.append((name, tuple(tensor.shape), str(tensor.dtype), bits))
    assert parts
    return sorted(parts)


def same(one, other, where=""):
    """Assert that nested states are equal, tensors bit for bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, item in one.items():
            same(item, other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for place, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{where}.{place}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
        assert torch.equal(*bits), where
    else:
        assert one == other, where
