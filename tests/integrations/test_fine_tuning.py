"""Fine-tuning by one line: weights of a file or of shards, another head, other rates.

The reference is the model of the library, trained by plain PyTorch on the same samples: a step has
all of them.
"""

import pytest
import safetensors.torch
import torch
import torchvision
import transformers
from torch.nn import functional as F

from runner.cli.main import main
from runner.data import Data
from runner.data.dataset import TensorPairs
from tests.integrations.test_libraries import Recorded
from tests.launch.ends import rows_of

SAMPLES, SEED = 8, 3
COMMON = ["device=cpu", "tracker=none", "scheduler=constant", "clip=none", f"seed={SEED}"]
COMMON += ["optimizer=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0", "log.flush=1"]
RATES = ["optimizer.lr=0.01", "optimizer.groups={fc.*:{lr:0.1}}"]
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 32}
PLUGINS = {
    "single": ["data.batch_size=8"],
    "fsdp": ["plugin=fsdp", "plugin.nproc=2", "data.batch_size=4"],
    "tensor": ["plugin=tensor", "plugin.nproc=2", "data.batch_size=8"],
}


def images(classes):
    """Random images and classes, the same for each number of classes."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return Data(TensorPairs(inputs, torch.arange(SAMPLES) % classes), None, "samples")


def tokens():
    """Random tokens, which are their own labels."""
    drawn = torch.randint(32, (SAMPLES, 12), generator=torch.Generator().manual_seed(1))
    return Data(Recorded({"input_ids": drawn, "labels": drawn}), None, "tokens")


def run(folder, *words):
    assert main([*COMMON, *words, f"hydra.run.dir={folder}"]) == 0
    return folder


def weights_of(run):
    file = run / "model.safetensors"
    assert main(["export", str(run), "--output", str(file)]) == 0
    return file, safetensors.torch.load_file(file)


def resnet(folder, classes, *words):
    data = [f"data={__name__}.images", f"+data.classes={classes}", f"data.batch_size={SAMPLES}"]
    model = ["model=resnet18", f"model.num_classes={classes}"]
    return run(folder, *data, *model, *words)


def test_a_resnet_of_an_exported_file_gets_another_head_and_two_rates(tmp_path, outputs):
    first = resnet(tmp_path / "first", 10, "train.max_duration=1ba")
    file, exported = weights_of(first)
    words = [f"model.weights={file}", "model.leave_out=[fc.*]", *RATES, "train.max_duration=2ba"]
    tuned = resnet(tmp_path / "tuned", 4, *words)
    log = (tuned / "runner.log").read_text()
    assert "left out by model.leave_out: fc.bias, fc.weight" in log

    torch.manual_seed(SEED)
    model = torchvision.models.resnet18(num_classes=4)
    kept = {name: tensor for name, tensor in exported.items() if not name.startswith("fc.")}
    assert model.load_state_dict(kept, strict=False).missing_keys == ["fc.weight", "fc.bias"]
    head = [*model.fc.parameters()]
    body = [p for name, p in model.named_parameters() if not name.startswith("fc.")]
    optimizer = torch.optim.SGD([{"params": head, "lr": 0.1}, {"params": body}], lr=0.01)
    inputs, targets = images(4).train.__getitems__(range(SAMPLES))
    for row in rows_of(tuned):
        loss = F.cross_entropy(model(inputs), targets)
        assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    _, weights = weights_of(tuned)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-3, atol=2e-5)


def llama(layers):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=layers, **LLAMA)
    )


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_llama_of_a_folder_of_shards_names_what_is_missing_and_left_over(
    plugin, tmp_path, outputs
):
    torch.manual_seed(0)
    shards = tmp_path / "shards"
    saved = llama(3)
    del saved.lm_head
    saved.save_pretrained(shards, max_shard_size="8KB")
    assert len([*shards.glob("*.safetensors")]) > 2
    config = ",".join(f"{key}:{value}" for key, value in LLAMA.items())
    words = [
        "model=transformers.LlamaForCausalLM",
        f"+model.config={{_target_:transformers.LlamaConfig,num_hidden_layers:2,{config}}}",
        *(f"model.weights={shards}", "model.strict=false", f"data={__name__}.tokens"),
        *("train.max_duration=3ba", "optimizer.lr=0.1", "optimizer.groups={*norm*:{lr:0.01}}"),
    ]
    tuned = run(tmp_path / "tuned", *words, *PLUGINS[plugin])
    log = (tuned / "runner.log").read_text()
    assert f"{shards} lacks 1 tensor of the model: lm_head.weight" in log
    assert f"the model lacks 9 tensors of {shards}: model.layers.2." in log

    torch.manual_seed(SEED)
    model = llama(2)
    model.load_state_dict(saved.state_dict(), strict=False)
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.SGD([{"params": others}, {"params": norms, "lr": 0.01}], lr=0.1)
    batch = tokens().train.batch(range(SAMPLES))
    for row in rows_of(tuned):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert row["grad/norm"] == pytest.approx(norm.item(), rel=1e-4)
        optimizer.step()
