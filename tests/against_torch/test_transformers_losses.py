"""Losses of transformers under accumulation are those of one batch, or are refused.

The reference is the class alone: the loss and the gradient of all samples of a step in one batch.
The step has two microbatches of four samples with unequal numbers of labels.
"""

import re
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf

from runner import Booster, Log, Trainer
from runner.booster import SinglePlugin
from runner.booster.loss import DivisorError
from tests.distributed.cases import Ddp
from tests.distributed.training import Rows
from tests.ranks import run_ranks

MICROBATCHES, SAMPLES, LENGTH, WORDS = 2, 4, 8, 23
IGNORED = -100
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": WORDS}
BERT = {**SIZES, "intermediate_size": 8, "max_position_embeddings": 32, "pad_token_id": 0}
BART = {
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
IMAGE = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 5}
VIT = {**SIZES, **IMAGE, "intermediate_size": 8}
SOUND = {
    **SIZES,
    "intermediate_size": 8,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "pad_token_id": 0,
}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def words(number):
    return torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator(number))


def some(labels, number, ignored=IGNORED):
    """Labels of which the first microbatch has few and the second most."""
    kept = torch.rand(labels.shape, generator=generator(number + 10)) < (0.25, 0.9)[number]
    kept.flatten(1)[:, -2] = True  # a loss of no label is NaN
    return labels.masked_fill(~kept, ignored)


def text(number):
    return {"input_ids": words(number), "labels": some(words(number), number)}


def translated(number):
    return {"input_ids": words(number), "labels": some(words(number + 5), number)}


def tagged(number):
    return {"input_ids": words(number), "labels": some(words(number) % 3, number)}


def classified(number):
    labels = words(number)[:, 0] % 3
    labels[: (3, 1)[number] : 2] = IGNORED
    return {"input_ids": words(number), "labels": labels}


def measured(number):
    labels = torch.randn(SAMPLES, 1, generator=generator(number), dtype=torch.float64)
    return {"input_ids": words(number), "labels": labels}


def several_labels(number):
    labels = torch.rand(SAMPLES, 3, generator=generator(number), dtype=torch.float64).round()
    return {"input_ids": words(number), "labels": labels}


def chosen(number):
    choices = torch.stack([words(number + further) for further in (0, 2, 4)], dim=1)
    return {"input_ids": choices, "labels": classified(number)["labels"]}


def answered(number):
    """In the first microbatch, some positions lie outside of the inputs."""
    starts = words(number)[:, 1] % LENGTH
    starts[: (2, 0)[number]] = LENGTH + 3
    return {"input_ids": words(number), "start_positions": starts, "end_positions": starts}


def answered_in_part(number):
    """Other samples lack a start than lack an end."""
    batch = answered(number)
    ends = batch["end_positions"].clone()
    ends[-1] = LENGTH + 3
    return {**batch, "end_positions": ends}


def images(number):
    shape = (SAMPLES, 3, 16, 16)
    return torch.randn(shape, generator=generator(number), dtype=torch.float64)


def seen(number):
    labels = words(number)[:, 0] % 5
    labels[: (3, 1)[number] : 2] = IGNORED
    return {"pixel_values": images(number), "labels": labels}


def segmented(number):
    labels = torch.randint(5, (SAMPLES, 16, 16), generator=generator(number))
    return {"pixel_values": images(number), "labels": some(labels, number, ignored=255)}


def masked_images(number):
    masked = torch.rand(SAMPLES, 16, generator=generator(number)) < (0.2, 0.8)[number]
    masked[:, 0] = True
    return {"pixel_values": images(number), "bool_masked_pos": masked}


def spoken(number):
    sound = torch.randn(SAMPLES, 400, generator=generator(number), dtype=torch.float64)
    labels = words(number)
    labels[:, (2, 6)[number] :] = IGNORED
    return {"input_values": sound, "labels": labels}


def two_headed(number):
    return {**text(number), "next_sentence_label": words(number)[:, 0] % 2}


def two_headed_choices(number):
    choices = words(number)[:, None].expand(-1, 2, -1).contiguous()
    labels = some(choices, number)
    ends = torch.full((SAMPLES, 2), LENGTH - 1)
    mc_labels = words(number)[:, 0] % 2
    return {"input_ids": choices, "labels": labels, "mc_token_ids": ends, "mc_labels": mc_labels}


class Case(NamedTuple):
    name: str
    options: dict[str, Any]
    batch: Any
    refused: str = ""

    def model(self):
        torch.manual_seed(0)
        kind = getattr(hf, self.name.partition(" ")[0])
        model = kind(kind.config_class(**self.options)).double()
        if hasattr(model, "decode_head"):  # batch norm sees one microbatch at a time
            model.decode_head.batch_norm = torch.nn.Identity()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            for attribute, value in list(vars(module).items()):
                if "drop" in attribute and isinstance(value, float):
                    setattr(module, attribute, 0.0)
        return model


TWO_MEANS = "start positions plus one over"
NOT_ALIKE = "the mean loss of a batch is not that of its parts.*loss.items=samples, labels or none"
SEVERAL_MEANS = "adds up means over different items.*loss.items=none"
GPT2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": WORDS, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
LLAMA = {**SIZES, "intermediate_size": 8, "num_key_value_heads": 2}
EXPERTS = {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1, "router_jitter_noise": 0.0}
EXPERTS |= {"experts_implementation": "eager"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OPT = {**SIZES, "ffn_dim": 8, "word_embed_proj_dim": 8, "dropout": 0.0, "attention_dropout": 0.0}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": WORDS}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
DISTIL = {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "vocab_size": WORDS}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [1, 1],
    "hidden_sizes": [8, 8],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 8,
    "num_labels": 5,
    "drop_path_rate": 0.0,
    "classifier_dropout_prob": 0.0,
}
BART = {**BART, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
BERT = {**BERT, **NO_DROPOUT}
LABELS = {"num_labels": 3}
STRIDE = {**NO_DROPOUT, "encoder_stride": 4}
MULTI = {**LABELS, "problem_type": "multi_label_classification"}
CASES = {
    case.name: case
    for case in (
        Case("GPT2LMHeadModel", GPT2, text),
        Case("LlamaForCausalLM", LLAMA, text),
        Case("OPTForCausalLM", OPT, text),
        Case("MixtralForCausalLM", EXPERTS, text),
        Case("BertLMHeadModel", {**BERT, "is_decoder": True}, text),
        Case("BartForCausalLM", BART, text),
        Case("BartForConditionalGeneration", BART, translated),
        Case("T5ForConditionalGeneration", T5, translated),
        Case("MarianMTModel", BART, translated),
        Case("BertForMaskedLM", BERT, text),
        Case("RobertaForMaskedLM", BERT, text),
        Case("DistilBertForMaskedLM", DISTIL, text),
        Case("BertForTokenClassification", BERT | LABELS, tagged),
        Case("RobertaForTokenClassification", BERT | LABELS, tagged),
        Case("BertForSequenceClassification", BERT | LABELS, classified),
        Case("BertForSequenceClassification of numbers", BERT | {"num_labels": 1}, measured),
        Case("BertForSequenceClassification of several labels", BERT | MULTI, several_labels),
        Case("GPT2ForSequenceClassification", GPT2 | LABELS | {"pad_token_id": 0}, classified),
        Case("BertForMultipleChoice", BERT, chosen),
        Case("BertForQuestionAnswering", BERT, answered),
        Case(
            "BertForQuestionAnswering in part",
            BERT,
            answered_in_part,
            TWO_MEANS,
        ),
        Case("DistilBertForQuestionAnswering", DISTIL, answered),
        Case("ViTForImageClassification", VIT | NO_DROPOUT, seen),
        Case("SegformerForSemanticSegmentation", SEGFORMER, segmented),
        Case("ViTForMaskedImageModeling", VIT | STRIDE, masked_images, NOT_ALIKE),
        Case("Wav2Vec2ForCTC", SOUND | {"ctc_loss_reduction": "sum"}, spoken),
        Case("HubertForCTC", SOUND | {"ctc_loss_reduction": "mean"}, spoken),
        Case("BertForPreTraining", BERT, two_headed, SEVERAL_MEANS),
        Case("GPT2DoubleHeadsModel", GPT2 | {"num_labels": 1}, two_headed_choices),
    )
}
CHEAP = ("GPT2LMHeadModel", "BartForCausalLM", "BertForPreTraining", "BertForQuestionAnswering")


@contextmanager
def in_float64():
    """Losses of transformers cast logits to float32."""
    before = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float = before


def part_of(batch, rank, ranks):
    return {name: tensor.chunk(ranks)[rank] for name, tensor in batch.items()}


def step(name, plugin):
    """Loss and norm of a step under a plugin, or why it is refused."""
    case = CASES[name]
    parallel = plugin()
    rows = Rows()
    model = case.model()
    batches = [case.batch(number) for number in range(MICROBATCHES)]
    microbatches = [part_of(batch, parallel.data_rank, parallel.data_size) for batch in batches]
    with in_float64():
        trainer = Trainer(
            model,
            microbatches,
            "1ba",
            booster=Booster(plugin=parallel),
            accumulation_steps=MICROBATCHES,
            log=Log([rows]),
        )
        try:
            trainer.fit()
        except DivisorError as error:
            return str(error)
    return rows.rows[0]["train/loss"], rows.rows[0]["grad/norm"]


def steps(names, plugin):
    return {name: step(name, plugin) for name in names}


def of_one_batch(name):
    """Loss and norm of all samples in one batch; transformers alone."""
    case = CASES[name]
    model = case.model().train()
    microbatches = [case.batch(number) for number in range(MICROBATCHES)]
    whole = {key: torch.cat([batch[key] for batch in microbatches]) for key in microbatches[0]}
    with in_float64():
        loss = model(**whole).loss
        loss.backward()
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.stack(squares).sum().sqrt().item()


def compare(name, found):
    case = CASES[name]
    if isinstance(found, str):
        assert case.refused, found
        assert re.search(case.refused, found), found
        return "refused"
    loss, norm = of_one_batch(name)
    error = max(abs(found[0] - loss) / abs(loss), abs(found[1] - norm) / norm)
    assert error < 1e-12, (name, found, (loss, norm))
    return error


def test_losses_of_transformers_with_unequal_labels_are_those_of_one_batch_or_refused():
    for name in CHEAP:
        compare(name, step(name, SinglePlugin))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_loss_of_transformers_is_right_or_refused_in_one_process(name):
    print(name, compare(name, step(name, SinglePlugin)))


@pytest.mark.slow
def test_each_loss_of_transformers_is_right_or_refused_on_two_ranks():
    for results in run_ranks(steps, 2, list(CASES), Ddp):
        for name, row in results.items():
            print(name, compare(name, row))
