"""Models reject invalid input; errors name the value and the remedy."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
from zoo import LENGTH, MODELS, VOCABULARY, build, config, ids, labels_for

from linformer_kit import (
    LinformerConfig,
    LinformerForCausalLM,
    LinformerForConditionalGeneration,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)

every_model = pytest.mark.parametrize("model_class", MODELS, ids=lambda model: model.__name__)


def call(model, input_ids, **kwargs):
    if isinstance(model, LinformerForConditionalGeneration):
        kwargs.setdefault("labels", ids(2, 5))
    return model(input_ids, **kwargs)


@every_model
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda x: x.index_fill(1, torch.tensor([3]), VOCABULARY),
            r"input_ids has ids from \d+ to 50 but the vocabulary has 50",
        ),
        (lambda x: x.index_fill(1, torch.tensor([3]), -1), r"input_ids has ids from -1 .*resize_token_embeddings"),
        (lambda x: x[0], r"input_ids has shape \(21,\); it must be \(batch, length\)"),
        (lambda x: x[:0], r"input_ids has shape \(0, 21\).*at least one example and one token"),
        (lambda x: x[:, :0], r"input_ids has shape \(2, 0\).*at least one example and one token"),
        (
            lambda x: x.repeat(1, 2),
            r"input has 42 tokens but max_position_embeddings is 32; .*resize_position_embeddings\(42\)",
        ),
        (lambda x: x.float(), r"input_ids is torch.float32; it must contain integers"),
        (lambda x: x.tolist(), r"input_ids is a list; it must be a tensor"),
    ],
)
def test_wrong_ids_raise(model_class, wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(build(model_class), wrong(ids()))


@every_model
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 20), r"attention_mask has shape \(2, 20\); it must be \(batch, length\) = \(2, 21\)"),
        (torch.ones(2, 1, 1, 21), r"attention_mask has shape \(2, 1, 1, 21\)"),
        (torch.tensor([[1] * 21, [0] * 21]), r"attention_mask has no real token in examples \[1\]; drop them"),
        (torch.full((2, 21), 2), r"attention_mask has integers from 2 to 2; only 0 \(padding\) and 1"),
        (torch.zeros(2, 21).long(), r"no real token in examples \[0, 1\]"),
        (torch.full((2, 21), 0.5), r"attention_mask is torch.float32; it must be boolean, or integers 0 and 1"),
    ],
)
def test_wrong_masks_raise(model_class, mask, message):
    with pytest.raises(ValueError, match=message):
        call(build(model_class), ids(), attention_mask=mask)


@pytest.mark.parametrize(
    ("model_class", "labels", "message"),
    [
        (
            LinformerForMaskedLM,
            torch.full((2, LENGTH), VOCABULARY),
            r"labels has 50; only 0 … 49 are allowed, or -100",
        ),
        (LinformerForMaskedLM, torch.full((2, LENGTH), -1), r"labels has -1; only 0 … 49"),
        (LinformerForMaskedLM, ids(2, 5), r"labels has shape \(2, 5\); it must be \(2, 21\)"),
        (LinformerForMaskedLM, torch.rand(2, LENGTH), r"labels is torch.float32; it must contain integers"),
        (LinformerForCausalLM, torch.full((2, LENGTH), VOCABULARY), r"labels has 50"),
        (LinformerForTokenClassification, torch.full((2, LENGTH), 3), r"labels has 3; only 0 … 2"),
        (LinformerForSequenceClassification, torch.tensor([0, 3]), r"labels has 3; only 0 … 2"),
        (LinformerForSequenceClassification, torch.tensor([0, 1, 2]), r"labels has shape \(3,\); it must be \(2,\)"),
        (
            LinformerForSequenceClassification,
            torch.rand(2, 4),
            r"labels has shape \(2, 4\).*multi_label.* must be \(2, 3\)",
        ),
        (LinformerForConditionalGeneration, torch.full((2, 5), VOCABULARY), r"labels has 50; only 0 … 49"),
        (
            LinformerForConditionalGeneration,
            torch.ones(5).long(),
            r"labels has shape \(5,\); it must be \(batch, length\)",
        ),
    ],
)
def test_wrong_labels_raise(model_class, labels, message):
    with pytest.raises(ValueError, match=message):
        build(model_class)(ids(), labels=labels)


def test_wrong_spans_raise():
    model = build(LinformerForQuestionAnswering)
    good = labels_for(model, ids())
    with pytest.raises(ValueError, match="start_positions has -1; a position is 0 or more"):
        model(ids(), **good | {"start_positions": torch.tensor([0, -1])})
    with pytest.raises(ValueError, match=r"end_positions has shape \(3,\); it must be \(2,\)"):
        model(ids(), **good | {"end_positions": torch.tensor([0, 1, 2])})


def test_other_wrong_inputs_raise():
    model = build(LinformerModel)
    with pytest.raises(ValueError, match="neither of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="both of input_ids and inputs_embeds"):
        model(ids(), inputs_embeds=torch.randn(2, LENGTH, 16))
    with pytest.raises(ValueError, match=r"inputs_embeds has shape \(2, 21, 15\); it must be \(batch, length, 16\)"):
        model(inputs_embeds=torch.randn(2, LENGTH, 15))
    with pytest.raises(ValueError, match=r"position_ids has values from 32 to 32; only 0 … 31"):
        model(ids(), position_ids=torch.full((2, LENGTH), 32))
    with pytest.raises(ValueError, match=r"position_ids has shape \(1, 20\); it must be \(2, 21\)"):
        model(ids(), position_ids=torch.arange(20)[None])
    with pytest.raises(ValueError, match="position_ids decrease within an example, as if several texts were packed"):
        model(ids(), position_ids=torch.arange(LENGTH)[None] % 10)
    with pytest.raises(ValueError, match=r"token_type_ids has values from 2 to 2; only 0 … 1"):
        model(ids(), token_type_ids=torch.full((2, LENGTH), 2))
    with pytest.raises(ValueError, match="encoder_hidden_states is given but add_cross_attention is False"):
        model(ids(), encoder_hidden_states=torch.randn(2, 3, 16))
    with pytest.raises(ValueError, match="encoder_hidden_states is missing but add_cross_attention is True"):
        build(LinformerForConditionalGeneration).decoder(ids())
    with pytest.raises(ValueError, match="past_key_values is not supported by encoders"):
        model(ids(), past_key_values=build(LinformerForCausalLM)(ids()).past_key_values)
    with pytest.raises(ValueError, match="the decoder has no input: pass labels, decoder_input_ids"):
        build(LinformerForConditionalGeneration)(ids())
    with pytest.raises(ValueError, match="decoder_start_token_id is None and pad_token_id is None; set both"):
        build(LinformerForConditionalGeneration, pad_token_id=None, bos_token_id=None)(ids(), labels=ids())


def test_learned_positions_limit_a_causal_model_and_sinusoidal_ones_do_not():
    learned, endless = (build(LinformerForCausalLM, position_embedding=kind) for kind in ("learned", "sinusoidal"))
    cache = learned(ids(1, 32)).past_key_values
    with pytest.raises(ValueError, match="input has 33 tokens but max_position_embeddings is 32"):
        learned(ids(1, 1), past_key_values=cache)
    assert endless(ids(1, 100)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"projection": "liner"}, "projection is 'liner'; it must be one of 'linear'.*did you mean 'linear'"),
        ({"sharing": "layer"}, "sharing is 'layer'.*did you mean 'layerwise'"),
        (
            {"projected_length": [4]},
            "projected_length has 1 numbers but num_hidden_layers is 2; pass one number, or one per layer",
        ),
        ({"projected_length": 0}, "projected_length is 0, which only layers with a window can have"),
        (
            {"projected_length": [4, 5], "sharing": "layerwise", "projection": "conv"},
            "cannot use a part of a shared one; pass one number, use sharing='kv', or projection='linear'",
        ),
        ({"slots": 5}, "slots=5 is more than block_length=4"),
        ({"num_attention_heads": 3}, "hidden_size=16 is not divisible by num_attention_heads=3"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads=4 is not divisible by num_key_value_heads=3",
        ),
        (
            {"local_width": 4},
            "local_width is 4; it must be an odd number of tokens, so that the window is centered, or 0 for none",
        ),
        ({"local_width": -1}, "local_width is -1; it must be an odd number"),
        (
            {"position_embedding": "rotary"},
            "position_embedding is 'rotary'; it must be one of 'learned', 'sinusoidal', 'none'",
        ),
        ({"decoder_attention": "casual"}, "decoder_attention is 'casual'.*did you mean 'causal'"),
        ({"classifier_pooling": "cls"}, "classifier_pooling is 'cls'; it must be one of 'mean', 'first'"),
        ({"hidden_act": "gellu"}, "hidden_act is 'gellu'.*did you mean 'gelu'"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5; it must be a number from 0 up to"),
        ({"rescale": True, "projection": "mean"}, "drop rescale"),
        ({"sharing": "none", "projection": "mean"}, "has no matrices"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"eos_token_id": 50}, "eos_token_id is 50 but vocab_size is 50"),
        ({"eos_token_id": [2, 77]}, "eos_token_id is 77 but vocab_size is 50"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps is -1.0; it must be larger than 0"),
        ({"add_cross_attention": True}, "add_cross_attention=True needs is_decoder=True"),
        ({"type_vocab_size": -1}, "type_vocab_size is -1; it must be 0"),
        ({"intermediate_size": -1}, r"intermediate_size is -1; it must be 0 \(no feed-forward\) or more"),
        ({"reversible": True, "norm_first": False}, "use norm_first=True, or reversible=False with gradient checkp"),
        ({"embedding_size": 0}, "embedding_size is 0; it must be an integer of at least 1"),
        ({"pad_token_id": 50}, "pad_token_id is 50 but vocab_size is 50; choose one of 0 … 49"),
    ],
)
def test_invalid_or_contradictory_values_raise(wrong, message):
    with pytest.raises(ValueError, match=message):
        config(**wrong)
    changed = config()
    for name, value in wrong.items():
        setattr(changed, name, value)
    with pytest.raises(ValueError, match=message):  # models look again
        LinformerModel(changed)


def test_models_reject_arguments_that_do_not_apply():
    with pytest.raises(ValueError, match="num_labels is 0; it must be at least 1"):
        config(num_labels=0)
    with pytest.raises(ValueError, match="the first token of a causal decoder attends only to itself; use 'mean'"):
        LinformerForSequenceClassification(config(is_decoder=True, classifier_pooling="first"))
    with pytest.raises(ValueError, match="a causal LM has no encoder; use LinformerForConditionalGeneration"):
        LinformerForCausalLM(config(is_decoder=True, add_cross_attention=True))


def test_wrong_types_are_refused_by_their_field():
    with pytest.raises(StrictDataclassFieldValidationError, match=r"hidden_size.*\n.*expected int, got str"):
        config(hidden_size="16")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("projected_lenght", "projected_length"), ("num_layers", "num_hidden_layers"), ("shareing", "sharing")],
)
def test_a_misspelled_field_is_refused_with_the_nearest_name(name, nearest, tmp_path):
    with pytest.raises(TypeError, match=f"LinformerConfig has no field '{name}'; did you mean '{nearest}'"):
        LinformerConfig(**{name: 64})
    with pytest.raises(TypeError, match=r"has no field 'zzz'; it has .*projected_length"):
        LinformerConfig(zzz=1)


def test_a_misspelled_field_is_refused_when_loading_too(tmp_path):
    build(LinformerModel).save_pretrained(tmp_path)
    for load in (AutoConfig.from_pretrained, AutoModel.from_pretrained, LinformerModel.from_pretrained):
        with pytest.raises(TypeError, match="did you mean 'projected_length'"):
            load(tmp_path, projected_lenght=64)
    assert AutoConfig.from_pretrained(tmp_path, classifier_dropout=0.3).classifier_dropout == 0.3


def test_a_checkpoint_of_one_kind_is_not_loaded_as_another(tmp_path):
    build(LinformerForConditionalGeneration).save_pretrained(tmp_path / "pair")
    with pytest.raises(ValueError, match="load the model with AutoModelForSeq2SeqLM"):
        AutoModel.from_pretrained(tmp_path / "pair")
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "pair").get_encoder().config.is_decoder is False
    build(LinformerForCausalLM).save_pretrained(tmp_path / "causal")
    with pytest.raises(ValueError, match="a masked LM needs both sides"):
        LinformerForMaskedLM.from_pretrained(tmp_path / "causal")
    assert AutoModel.from_pretrained(tmp_path / "causal").config.is_decoder


def test_a_checkpoint_with_another_projected_length_is_not_loaded_silently(tmp_path):
    build(LinformerModel).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModel.from_pretrained(tmp_path, projected_length=4)
