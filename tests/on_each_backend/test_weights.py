"""Weights go to PyTorch and back; both sides say the same."""

import warnings

import keras
import numpy as np
import pytest
import torch
from battery import COMBINATIONS, assert_close, normal, numpy, randomise

import linformer_kit
from linformer_kit.keras import LinearMultiHeadAttention, from_torch, to_torch

RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 30, (3, 19))
MASK = RNG.random((3, 19)) > 0.3
IDS[~MASK] = 0
TARGET = RNG.integers(1, 30, (3, 11))
MODELS = (
    "LinformerModel",
    "LinformerForSequenceClassification",
    "LinformerForMaskedLM",
    "LinformerForCausalLM",
    "LinformerForConditionalGeneration",
)
# one difference from the next each, so that every option is met in some model
CONFIGS = [
    {"projection": "linear", "sharing": "headwise", "rescale": True, "local_width": 5},
    {"projection": "dynamic", "sharing": "layerwise", "position_embedding": "sinusoidal"},
    {"projection": "conv", "sharing": "none", "norm_first": False, "hidden_act": "relu", "tie_word_embeddings": False},
    {"projection": "mean", "sharing": "layerwise", "head_dim": 6, "position_embedding": "none", "type_vocab_size": 0},
    {"projection": "linear", "sharing": "layerwise", "rescale": True, "num_decoder_layers": 1},
    {"projection": "none", "sharing": "headwise", "classifier_pooling": "first", "hidden_act": "silu"},
    {"projection": "linear", "sharing": "kv", "decoder_attention": "full", "projected_length": [4, 7]},
    {"projection": "max", "sharing": "headwise"},
    {"projection": "random", "sharing": "none"},
]


def in_torch(name, **changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 30,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
    }
    more = {
        "max_position_embeddings": 24,
        "projected_length": 5,
        "block_length": 4,
        "slots": 2,
        "num_labels": 3,
        "bos_token_id": 1,
    }
    model = getattr(linformer_kit, name)(linformer_kit.LinformerConfig(**{**sizes, **more, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
    return model.eval()


def says(twin):
    """What a PyTorch model gives for the inputs."""
    given = {"input_ids": torch.from_numpy(IDS), "attention_mask": torch.from_numpy(MASK)}
    if twin.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.from_numpy(TARGET)
    with torch.no_grad():
        output = twin(**given)
    return (output.logits if "logits" in output else output.last_hidden_state).numpy()


def compared(model, twin):
    ours = numpy(model({"input_ids": IDS, "decoder_input_ids": TARGET} if twin.config.is_encoder_decoder else IDS))
    theirs = says(twin)
    if theirs.shape[:2] == MASK.shape:  # what stands at padding means nothing
        ours, theirs = ours[MASK], theirs[MASK]
    assert_close(ours, theirs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_both_sides_say_the_same_and_nothing_is_lost_on_the_way(name, number):
    twin = in_torch(name, **CONFIGS[number])
    model = from_torch(twin)
    compared(model, twin)
    assert model.num_params() == sum(t.numel() for t in {t.data_ptr(): t for t in twin.state_dict().values()}.values())
    back = to_torch(model)
    assert type(back) is type(twin)
    for key, tensor in twin.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    for key in (
        "projection",
        "hidden_size",
        "head_dim",
        "rescale",
        "position_embedding",
        "local_width",
        "tie_word_embeddings",
        "projected_length",
    ):
        assert getattr(back.config, key) == getattr(twin.config, key), key


@pytest.mark.parametrize(("projection", "sharing"), [*COMBINATIONS, ("none", "headwise")])
def test_the_layer_says_what_its_twin_says(projection, sharing):
    torch.manual_seed(0)
    options = {"max_length": 24, "projected_length": 5, "projection": projection, "sharing": sharing}
    twin = linformer_kit.LinformerAttention(
        12, 3, **options, rescale=projection == "linear", bias=projection != "conv"
    ).eval()
    layer = from_torch(twin)
    randomise(layer)
    twin.load_state_dict(to_torch(layer).state_dict())
    x = normal(3, 19, 12)
    with torch.no_grad():
        expected = twin(torch.from_numpy(x), mask=torch.from_numpy(MASK)).numpy()
    assert_close(numpy(layer(x, x, value_mask=MASK))[MASK], expected[MASK])


@pytest.mark.parametrize(
    "changes", [{"sharing": "none"}, {"sharing": "none", "projection": "conv"}, {"projection": "dynamic"}]
)
def test_key_value_heads_that_serve_several_are_repeated(changes):
    twin = in_torch("LinformerForConditionalGeneration", **changes, num_key_value_heads=2)
    compared(from_torch(twin), twin)


def test_they_generate_alike():
    for name in ("LinformerForCausalLM", "LinformerForConditionalGeneration"):
        twin = in_torch(name, eos_token_id=2)
        prompt = np.where(IDS == 0, 5, IDS)[:, :9]
        expected = twin.generate(torch.from_numpy(prompt), max_new_tokens=12, do_sample=False).numpy()
        np.testing.assert_array_equal(from_torch(twin).generate(prompt, max_new_tokens=12), expected)


@pytest.mark.parametrize("name", MODELS)
def test_saved_models_and_runs_open(name, tmp_path):
    twin = in_torch(name)
    twin.save_pretrained(tmp_path / "run" / "model")
    for folder in (tmp_path / "run", str(tmp_path / "run" / "model")):
        compared(from_torch(folder), twin)


def test_a_classifier_gives_logits_or_what_it_is_told_to():
    twin = in_torch("LinformerForSequenceClassification")
    probabilities = torch.from_numpy(says(twin)).softmax(dim=-1).numpy()
    assert_close(from_torch(twin, classifier_activation="softmax")(IDS), probabilities)
    assert from_torch(twin, dropout=0.3).options.dropout == 0.3


def test_what_has_no_twin_is_refused(tmp_path):
    with pytest.raises(
        TypeError, match="LinformerForTokenClassification has no twin in Keras; those that have are LinformerModel"
    ):
        from_torch(in_torch("LinformerForTokenClassification"))
    with pytest.raises(ValueError, match="is_decoder=True has no twin in Keras"):
        from_torch(in_torch("LinformerModel", is_decoder=True))
    with pytest.raises(ValueError, match=r"eos_token_id is \[2, 3\]; here there is one end"):
        from_torch(in_torch("LinformerForCausalLM", eos_token_id=[2, 3]))
    with pytest.raises(
        FileNotFoundError, match=r"holds no model: there is neither config\.json nor model/config\.json"
    ):
        from_torch(tmp_path)
    in_torch("LinformerForQuestionAnswering").save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="holds a LinformerForQuestionAnswering, which has no twin in Keras"):
        from_torch(tmp_path)
    with pytest.raises(TypeError, match="Dense has no twin in PyTorch"):
        to_torch(keras.layers.Dense(3))
    with pytest.raises(ValueError, match="what is to be changed is 'n_heads'; it must be one of"):
        from_torch(in_torch("LinformerForCausalLM"), n_heads=2)
    with pytest.raises(ValueError, match="this layer has no weights yet"):
        to_torch(LinearMultiHeadAttention(2, 4, 3))
    quantised = from_torch(in_torch("LinformerForCausalLM"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of every layer that has nothing to quantise
        quantised.quantize("int8")
    with pytest.raises(ValueError, match="the model is quantised"):
        to_torch(quantised)
    with pytest.raises(ValueError, match="a causal way of attending that LinformerAttention does not have"):
        to_torch(from_torch(in_torch("LinformerForCausalLM")).decoder.blocks[0].attention)
    for projection_dim in (3, None):
        layer = LinearMultiHeadAttention(2, 4, projection_dim, attention_axes=2)
        layer.build((None, 5, 9, 8), (None, 5, 9, 8))
        with pytest.raises(ValueError, match="a sequence of several axes that LinformerAttention does not have"):
            to_torch(layer)
    for options in ({"value_dim": 3}, {"output_shape": 3}, {"use_gate": True}):
        layer = LinearMultiHeadAttention(2, 4, 3, **options)
        layer.build((None, 9, 8), (None, 9, 8))
        with pytest.raises(ValueError, match=f"has a {next(iter(options))} that LinformerAttention does not have"):
            to_torch(layer)
