"""Blocks are compiled in place, once for all that are alike."""

import pytest
import torch

from runner.models.gpt import GPT
from runner.parallel.compiling import compile_in_place, wrong_option

SIZES = {"vocabulary": 13, "context": 10, "layers": 3, "heads": 2, "width": 8}


# torch's tracer looks at the attribute of hidden states.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_that_are_alike_are_compiled_once():
    torch.manual_seed(0)
    model = GPT(**SIZES, dropout=0.0, tied=True, bias=True)
    names = list(model.state_dict())
    tokens = torch.randint(13, (2, 10))
    expected = model(tokens)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compile_in_place(model, blocks=True, backend=backend)
    assert torch.equal(model(tokens), expected)
    assert len(graphs) == 1
    assert list(model.state_dict()) == names


def test_a_machine_without_a_compiler_cannot_use_inductor(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    name, reason = wrong_option({"backend": "inductor"}, on_cpu=True)
    assert name == "backend"
    assert "needs a C++ compiler" in reason
    assert wrong_option({"backend": "aot_eager"}, on_cpu=True) is None
