"""Conversion to PyTorch and back: equal outputs, no weight lost."""

import inspect
import warnings

import keras
import numpy as np
import pytest
import torch
from battery import IS_TORCH, assert_close, normal, numpy, only_torch, randomize, some_sharings

import linformer_kit
from linformer_kit.keras import LinearMultiHeadAttention, from_torch, projection, to_torch
from linformer_kit.models import projection_linformer

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
# together these cover every option
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
    {"projection": "head_conv", "sharing": "layerwise"},
    {"projection": "dynamic", "sharing": "layerwise", "window_length": 3, "global_tokens": 1, "distance_bias": True},
]


def make_torch_model(name, **changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 30,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 24,
        "projected_length": 5,
        "block_length": 4,
        "slots": 2,
        "num_labels": 3,
        "bos_token_id": 1,
    }
    model = getattr(linformer_kit, name)(linformer_kit.LinformerConfig(**{**sizes, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
    return model.eval()


def torch_output(torch_model):
    """The output of a PyTorch model for the test inputs."""
    inputs = {"input_ids": torch.from_numpy(IDS), "attention_mask": torch.from_numpy(MASK)}
    if torch_model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.from_numpy(TARGET)
    with torch.no_grad():
        output = torch_model(**inputs)
    return (output.logits if "logits" in output else output.last_hidden_state).numpy()


def assert_equal_outputs(model, torch_model):
    ours = numpy(
        model({"input_ids": IDS, "decoder_input_ids": TARGET} if torch_model.config.is_encoder_decoder else IDS)
    )
    theirs = torch_output(torch_model)
    if theirs.shape[:2] == MASK.shape:  # outputs at padding are undefined
        ours, theirs = ours[MASK], theirs[MASK]
    assert_close(ours, theirs)


# every model with every configuration on PyTorch; elsewhere every model with another configuration
PAIRS = [
    (name, number)
    for number, config in enumerate(CONFIGS)
    for name in MODELS
    if not ("window_length" in config and name == "LinformerForCausalLM")
]


@pytest.mark.parametrize(("name", "number"), PAIRS if IS_TORCH else PAIRS[: 5 * len(MODELS) : len(MODELS) + 1])
def test_outputs_are_equal_and_the_round_trip_is_exact(name, number):
    torch_model = make_torch_model(name, **CONFIGS[number])
    model = from_torch(torch_model)
    assert_equal_outputs(model, torch_model)
    assert model.num_params() == sum(
        t.numel() for t in {t.data_ptr(): t for t in torch_model.state_dict().values()}.values()
    )
    back = to_torch(model)
    assert type(back) is type(torch_model)
    for key, tensor in torch_model.state_dict().items():
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
        "window_length",
        "global_tokens",
        "distance_bias",
    ):
        assert getattr(back.config, key) == getattr(torch_model.config, key), key


@only_torch
@pytest.mark.parametrize("sharing", ["headwise", "layerwise"])
def test_a_model_with_only_a_window_is_converted(sharing):
    torch_model = make_torch_model("LinformerForMaskedLM", projected_length=0, window_length=3, sharing=sharing)
    model = from_torch(torch_model)
    assert_equal_outputs(model, torch_model)
    assert to_torch(model).config.projected_length == 0


@only_torch
@pytest.mark.parametrize("sizes", [(5, 3, 2), (0, 3, 1)])
@pytest.mark.parametrize("distance_bias", [False, True])
def test_the_window_of_a_layer_is_converted(sizes, distance_bias):
    options = dict(zip(("projected_length", "window_length", "global_tokens"), sizes, strict=True))
    torch_layer = linformer_kit.LinformerAttention(12, 3, **options, distance_bias=distance_bias)
    back = to_torch(from_torch(torch_layer))
    assert tuple(getattr(back, name) for name in options) == sizes
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in torch_layer.state_dict().items())


@pytest.mark.parametrize(("projection", "sharing"), [*some_sharings(), ("none", "headwise")])
def test_the_layers_have_equal_outputs(projection, sharing):
    torch.manual_seed(0)
    options = {"max_length": 24, "projected_length": 5, "projection": projection, "sharing": sharing}
    torch_model = linformer_kit.LinformerAttention(
        12, 3, **options, rescale=projection == "linear", bias=projection != "conv"
    ).eval()
    layer = from_torch(torch_model)
    randomize(layer)
    torch_model.load_state_dict(to_torch(layer).state_dict())
    x = normal(3, 19, 12)
    with torch.no_grad():
        expected = torch_model(torch.from_numpy(x), mask=torch.from_numpy(MASK)).numpy()
    assert_close(numpy(layer(x, x, value_mask=MASK))[MASK], expected[MASK])


@only_torch
@pytest.mark.parametrize(("projection", "sharing"), [*some_sharings(), ("none", "headwise")])
def test_the_layers_have_equal_outputs_for_separate_keys_and_values(projection, sharing):
    options = {"max_length": 24, "projected_length": 5, "projection": projection, "sharing": sharing, "context_dim": 10}
    layer = from_torch(linformer_kit.LinformerAttention(12, 3, **options, rescale=projection == "linear"))
    randomize(layer)
    torch_layer = to_torch(layer).eval()
    x, key, value = normal(3, 19, 12), normal(3, 19, 10), normal(3, 19, 10)
    with torch.no_grad():
        expected = torch_layer(
            torch.from_numpy(x), torch.from_numpy(key), value=torch.from_numpy(value), mask=torch.from_numpy(MASK)
        )
    assert_close(layer(x, value, key, value_mask=MASK), expected.numpy())


@only_torch
@pytest.mark.parametrize(
    "changes",
    [
        {"sharing": "none"},
        {"sharing": "none", "projection": "conv"},
        {"projection": "dynamic"},
        {"sharing": "none", "projection": "dynamic", "window_length": 3, "global_tokens": 1, "distance_bias": True},
    ],
)
def test_grouped_key_value_heads_are_repeated(changes):
    torch_model = make_torch_model("LinformerForConditionalGeneration", **changes, num_key_value_heads=2)
    assert_equal_outputs(from_torch(torch_model), torch_model)


@only_torch
@pytest.mark.parametrize("name", ["LinformerForCausalLM", "LinformerForConditionalGeneration"])
def test_both_generate_the_same_ids(name):
    torch_model = make_torch_model(name, eos_token_id=2)
    prompt = np.where(IDS == 0, 5, IDS)[:, :9]
    expected = torch_model.generate(torch.from_numpy(prompt), max_new_tokens=12, do_sample=False).numpy()
    np.testing.assert_array_equal(from_torch(torch_model).generate(prompt, max_new_tokens=12), expected)


@only_torch
@pytest.mark.parametrize("name", MODELS)
def test_directories_of_models_and_runs_can_be_converted(name, tmp_path):
    torch_model = make_torch_model(name)
    torch_model.save_pretrained(tmp_path / "run" / "model")
    for folder in (tmp_path / "run", str(tmp_path / "run" / "model")):
        assert_equal_outputs(from_torch(folder), torch_model)


@only_torch
def test_options_can_be_changed():
    torch_model = make_torch_model("LinformerForSequenceClassification")
    probabilities = torch.from_numpy(torch_output(torch_model)).softmax(dim=-1).numpy()
    assert_close(from_torch(torch_model, classifier_activation="softmax")(IDS), probabilities)
    assert from_torch(torch_model, dropout=0.3).options.dropout == 0.3


@only_torch
def test_unsupported_models_raise_an_error(tmp_path):
    with pytest.raises(
        TypeError, match="LinformerForTokenClassification has no Keras counterpart; supported are LinformerModel"
    ):
        from_torch(make_torch_model("LinformerForTokenClassification"))
    with pytest.raises(ValueError, match="is_decoder=True has no Keras counterpart"):
        from_torch(make_torch_model("LinformerModel", is_decoder=True))
    with pytest.raises(ValueError, match=r"eos_token_id is \[2, 3\], but Keras models have one end_id"):
        from_torch(make_torch_model("LinformerForCausalLM", eos_token_id=[2, 3]))
    for changes in ({"embedding_size": 6}, {"outer_norms": False}, {"reversible": True}, {"intermediate_size": 0}):
        ((name, value),) = changes.items()
        with pytest.raises(ValueError, match=f"{name} is {value}, but .*; use the PyTorch model"):
            from_torch(make_torch_model("LinformerForMaskedLM", **changes))
    with pytest.raises(FileNotFoundError, match=r"has no model: there is neither config\.json nor model/config\.json"):
        from_torch(tmp_path)
    make_torch_model("LinformerForQuestionAnswering").save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="contains a LinformerForQuestionAnswering, which has no Keras counterpart"):
        from_torch(tmp_path)
    with pytest.raises(TypeError, match="Dense has no PyTorch counterpart"):
        to_torch(keras.layers.Dense(3))
    with pytest.raises(ValueError, match="the option to change is 'n_heads'; it must be one of"):
        from_torch(make_torch_model("LinformerForCausalLM"), n_heads=2)
    with pytest.raises(ValueError, match="this layer has no weights yet"):
        to_torch(LinearMultiHeadAttention(2, 4, 3))
    quantized = from_torch(make_torch_model("LinformerForCausalLM"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns about every layer that cannot be quantized
        quantized.quantize("int8")
    with pytest.raises(ValueError, match="the model is quantized"):
        to_torch(quantized)
    with pytest.raises(ValueError, match="a causal mask, which LinformerAttention does not support"):
        to_torch(from_torch(make_torch_model("LinformerForCausalLM")).decoder.blocks[0].attention)
    for projection_dim in (3, None):
        layer = LinearMultiHeadAttention(2, 4, projection_dim, attention_axes=2)
        layer.build((None, 5, 9, 8), (None, 5, 9, 8))
        with pytest.raises(ValueError, match="a multi-axis sequence, which LinformerAttention does not support"):
            to_torch(layer)
    for options in ({"value_dim": 3}, {"output_shape": 3}, {"use_gate": True}):
        layer = LinearMultiHeadAttention(2, 4, 3, **options)
        layer.build((None, 9, 8), (None, 9, 8))
        with pytest.raises(ValueError, match=f"has a {next(iter(options))}, which LinformerAttention does not support"):
            to_torch(layer)


FACTS = (
    *("has_matrices", "takes_any_length", "can_rescale", "sized_by_max_length", "sized_by_width", "sized_by_head"),
    "can_have_window",
)


@pytest.mark.parametrize("kind", projection.Projection.kinds)
def test_facts_about_a_projection_equal_those_in_pytorch(kind):
    here, there = projection.Projection.kinds[kind], projection_linformer.Projection.kinds[kind]
    assert {fact: getattr(here, fact) for fact in FACTS} == {fact: getattr(there, fact) for fact in FACTS}


def test_every_projection_of_pytorch_exists_except_full_attention():
    assert {*projection.Projection.kinds, "none"} == set(projection_linformer.Projection.kinds)


def test_make_projection_has_the_defaults_of_pytorch():
    here, there = (
        inspect.signature(module.make_projection).parameters for module in (projection, projection_linformer)
    )
    assert {name: here[name].default for name in set(here) & set(there)} == {
        name: there[name].default for name in set(here) & set(there)
    }
