"""Models of torchvision, timm and transformers as a user names them, and small data for them.

Everything is in float64, so that rounding cannot explain a difference.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset

from runner.data import Data

CLASSES, VOCABULARY, LENGTH, STEPS = 10, 32, 8, 10
LR, MOMENTUM, LIMIT = 0.005, 0.9, 0.25  # At 0.05 Inception amplifies rounding 1e12 times.
COMMON = [
    *(f"optimizer.lr={LR}", f"optimizer.momentum={MOMENTUM}", "optimizer.weight_decay=0"),
    *(
        "scheduler=constant",
        "clip=norm",
        f"clip.threshold={LIMIT}",
        f"train.max_duration={STEPS}ba",
    ),
    *(f"train.max_duration={STEPS}ba", "device=cpu", "tracker=none", "seed=3"),
]
_SIZES = "hidden_size:16,intermediate_size:24,num_hidden_layers:2,num_attention_heads:2"
_DECODER = f"{_SIZES},num_key_value_heads:2,vocab_size:{VOCABULARY}"

VISION = {
    "resnet18": ("torchvision.models.resnet18", {"num_classes": CLASSES}, 32),
    "inception_v3": (
        "torchvision.models.inception_v3",
        {"num_classes": CLASSES, "aux_logits": "false", "init_weights": "false", "dropout": 0.0},
        80,
    ),
    "vit_b_16": (
        "torchvision.models.VisionTransformer",
        {
            "image_size": 32,
            "patch_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "hidden_dim": 16,
            "mlp_dim": 24,
            "num_classes": CLASSES,
        },
        32,
    ),
    "vit_tiny": (
        "timm.create_model",
        {
            "model_name": "vit_tiny_patch16_224",
            "img_size": 32,
            "num_classes": CLASSES,
            "depth": 2,
        },
        32,
    ),
    "nf_resnet": (
        "timm.create_model",
        {
            "model_name": "nf_resnet26",
            "num_classes": CLASSES,
            "depths": "[1,1,1,1]",
            "channels": "[32,32,64,64]",
            "stem_chs": 16,
        },
        32,
    ),
    "deit": (
        "timm.create_model",
        {
            "model_name": "deit_tiny_distilled_patch16_224",
            "img_size": 32,
            "num_classes": CLASSES,
            "depth": 2,
        },
        32,
    ),
}
"""Target, arguments and pixels of each model."""

LANGUAGE = {
    "llama": ("LlamaForCausalLM", f"_target_:transformers.LlamaConfig,{_DECODER}"),
    "gpt2": (
        "GPT2LMHeadModel",
        f"_target_:transformers.GPT2Config,vocab_size:{VOCABULARY},n_embd:16,n_layer:2,n_head:2,"
        "n_positions:16,resid_pdrop:0,embd_pdrop:0,attn_pdrop:0,bos_token_id:0,eos_token_id:0",
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        f"_target_:transformers.Qwen3Config,{_DECODER},head_dim:8,tie_word_embeddings:true",
    ),
    "mixtral": (
        "MixtralForCausalLM",
        f"_target_:transformers.MixtralConfig,{_DECODER},num_local_experts:4,"
        "experts_implementation:eager",
    ),
    "bert": (
        "BertForSequenceClassification",
        f"_target_:transformers.BertConfig,{_SIZES},vocab_size:{VOCABULARY},num_labels:3,"
        "hidden_dropout_prob:0,attention_probs_dropout_prob:0",
    ),
}
"""Class of transformers and its configuration."""

MODELS = [*VISION, *LANGUAGE]


def words_for(name: str, ranks: int) -> list[str]:
    """The request for a model and its data; ``ranks`` data-parallel ranks read 8 samples a step."""
    data = "tests.libraries.cases"
    dropped = ["~model.width", "~model.num_classes", "~data.test_fraction", "~data.seed"]
    batch = f"data.batch_size={8 // ranks}"
    if name in LANGUAGE:
        kind, config = LANGUAGE[name]
        model = [f"model._target_=transformers.{kind}", f"+model.config={{{config}}}"]
        kind = "sentences" if name == "bert" else "tokens"
        return [*dropped, *model, f"data._target_={data}.{kind}", batch, *COMMON]
    target, arguments, pixels = VISION[name]
    model = [f"model._target_={target}"]
    model += [f"+model.{key}={value}" for key, value in arguments.items()]
    return [
        *dropped,
        *model,
        f"data._target_={data}.images",
        f"+data.pixels={pixels}",
        batch,
        *COMMON,
    ]


class Recorded(Dataset[Any]):
    """Samples in memory that records which of them were read, in order.

    Args:
        tensors: what a batch holds: by name, or in a tuple.
    """

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(next(iter(tree_leaves(self.tensors))))

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.batch(index)

    def batch(self, indices: int | list[int]) -> Any:
        """The samples of these indices, unrecorded."""
        return tree_map(lambda tensor: tensor[indices], self.tensors)


def _data(tensors: Any, items: Any) -> Data:
    train, test = (
        Recorded(tree_map(lambda tensor, at=at: tensor[at], tensors))
        for at in (slice(8, None), slice(8))
    )
    return Data(train=train, test=test, items=items)


def _drawn() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def images(pixels: int) -> Data:
    """Pairs of random images [3, pixels, pixels] and random classes."""
    inputs = torch.randn(48, 3, pixels, pixels, generator=_drawn(), dtype=torch.float64)
    return _data((inputs, torch.randint(CLASSES, (48,), generator=_drawn())), "samples")


def tokens() -> Data:
    """Dictionaries of random tokens [LENGTH] and labels, of which some are ignored."""
    inputs = torch.randint(VOCABULARY, (48, LENGTH), generator=_drawn())
    ignored = torch.rand(inputs.shape, generator=_drawn()) < 0.3
    return _data({"input_ids": inputs, "labels": inputs.masked_fill(ignored, -100)}, "tokens")


def sentences() -> Data:
    """Dictionaries of random tokens [LENGTH] and one of three random classes."""
    inputs = torch.randint(VOCABULARY, (48, LENGTH), generator=_drawn())
    labels = torch.randint(3, (48,), generator=_drawn())
    return _data({"input_ids": inputs, "labels": labels}, "samples")
