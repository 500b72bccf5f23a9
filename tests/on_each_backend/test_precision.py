"""bfloat16 on long inputs against float64: layers, gradients, and every model.

A float of 8 bits cannot count beyond 256: long sums, counts and positions must be in float32. The float64 models are
those of PyTorch with the same weights, which other tests compare with the Keras models in float32.
"""

import keras
import numpy as np
import pytest
import torch
from battery import (
    IS_TORCH,
    ORDERS,
    PROJECTIONS,
    assert_every_weight_learns,
    cases,
    in_order,
    normal,
    numpy,
    randomize,
)

from linformer_kit.keras import (
    LinearMultiHeadAttention,
    Linformer,
    LinformerBackbone,
    LinformerCausalLM,
    LinformerMaskedLM,
    LinformerSeq2Seq,
    to_torch,
)

LENGTH = 2048
# bfloat16 has 8 bits: a rounding errs by up to 2⁻⁹, relatively, and by 2⁻⁹ / √3 on average
ROUNDING = 2**-9 / 3**0.5
# numbers of roundings between input and output, about twice as many as measured; sums that stop at 256 err by hundreds.
# A model also rounds the sum of the residuals after every layer; PyTorch under autocast errs as much as these layers
LAYER, MODEL, GRADIENT = 50, 120, 250
MASK = np.random.default_rng(1).random((2, LENGTH)) > [[0.0], [0.4]]


def assert_roundings(actual, expected, roundings):
    """The root mean square error is that of so many independent roundings of the result to bfloat16."""
    actual, expected = numpy(actual).astype("float64"), expected.detach().numpy()
    error = np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))
    assert error < roundings**0.5 * ROUNDING, f"{(error / ROUNDING) ** 2:.1f} roundings"


def built(**options):
    layer = LinearMultiHeadAttention(3, 4, 4, max_length=LENGTH, dtype="mixed_bfloat16", **options)
    layer.build((None, LENGTH, 12), (None, LENGTH, 12))
    for weight in layer.weights:
        if "bias" in weight.path:
            weight.assign(normal(*weight.shape) / 2)
    if layer.projection_kind == "random":  # scores of ordinary size
        layer.projection.weight.assign(numpy(layer.projection.weight) / LENGTH**0.5)
    return layer


@pytest.mark.parametrize(
    "options",
    cases(
        *({"projection": name} for name in PROJECTIONS),
        torch=[{"projection": "linear", "rescale": True}, {"projection": "conv", "rescale": True}],
    ),
    ids=str,
)
def test_layers_are_close_to_float64(options):
    layer, x = built(**options), normal(2, LENGTH, 12) + 1  # sums over the tokens do not cancel
    exact, tokens, mask = to_torch(layer).double(), torch.from_numpy(x).double(), torch.from_numpy(MASK)
    for order in ORDERS:
        with in_order(order):
            assert_roundings(layer(x, x), exact(tokens), LAYER)
            assert_roundings(numpy(layer(x, x, value_mask=MASK))[MASK], exact(tokens, mask=mask)[mask], LAYER)


@pytest.mark.parametrize("projection", PROJECTIONS if IS_TORCH else ["mean", "linear"])
def test_layers_with_a_window_are_close_to_float64(projection):
    layer, x = (
        built(projection=projection, window_length=16, global_tokens=1, distance_bias=True),
        normal(2, LENGTH, 12) + 1,
    )
    exact, tokens, mask = to_torch(layer).double(), torch.from_numpy(x).double(), torch.from_numpy(MASK)
    assert_roundings(numpy(layer(x, x, value_mask=MASK))[MASK], exact(tokens, mask=mask)[mask], LAYER)


def test_gradients_are_close_to_float64():
    """One step of gradient descent with one layer of each kind."""
    layers = [built(projection=projection) for projection in (PROJECTIONS if IS_TORCH else ("linear", "conv", "mean"))]
    torch_layers = [to_torch(layer).double() for layer in layers]
    inputs = keras.Input((LENGTH, 12))
    model = keras.Model(inputs, [layer(inputs, inputs) for layer in layers])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    x, y = normal(2, LENGTH, 12) + 1, normal(2, LENGTH, 12) + 1
    model.train_on_batch(x, [y] * len(layers))
    tokens, target = (torch.from_numpy(array).double() for array in (x, y))
    for layer, torch_layer in zip(layers, torch_layers, strict=True):
        (torch_layer(tokens) - target).square().mean().backward()
        after = to_torch(layer).double().state_dict()
        for name, parameter in torch_layer.named_parameters():
            if name.split(".")[0] not in ("query", "key"):  # gradients of scores cancel, in any half precision
                assert_roundings((parameter - after[name]).detach().numpy(), parameter.grad, GRADIENT)


SIZES = {"k": 6, "max_len": 400, "vocab_size": 300, "d_model": 16, "d_ff": 24, "n_heads": 2, "n_layers": 1, "slots": 2}
IDS = np.random.default_rng(2).integers(3, 300, (4, 400))
IDS[1:, 350:] = 0
TARGET = np.roll(IDS, 1, axis=1)


def exact_outputs(model, ids, is_real):
    """Logits or hidden states of the PyTorch model in float64."""
    torch_model = to_torch(model).double().eval()
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(is_real)}
    if torch_model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.from_numpy(TARGET)
    with torch.no_grad():
        output = torch_model(**inputs)
    return output.logits if "logits" in output else output.last_hidden_state


@pytest.mark.parametrize(
    ("kind", "options"),
    cases(
        (Linformer, {"projection": "mean", "positions": "sinusoidal", "n_classes": 3}),
        (LinformerMaskedLM, {"window_length": 16, "global_tokens": 1, "local_width": 5, "projection": "dynamic"}),
        (LinformerCausalLM, {}),
        (LinformerSeq2Seq, {"sharing": "layerwise", "start_id": 1}),
        torch=[
            (Linformer, {"pad_id": None, "classifier_activation": None}),
            (LinformerBackbone, {"projection": "conv", "norm_first": False}),
            (LinformerCausalLM, {"decoder_attention": "full", "tied": False}),
            (LinformerSeq2Seq, {"full_attn": True}),
        ],
    ),
)
def test_models_in_bfloat16_are_close_to_float64_and_train_generate_and_save(kind, options, tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = kind(**SIZES, **options)
    assert {keras.backend.standardize_dtype(weight.dtype) for weight in model.weights} <= {"float32", "uint32", "int32"}
    is_seq2seq, is_classifier = kind is LinformerSeq2Seq, kind is Linformer
    ids = IDS + 3 * (IDS == 0) if model.options.pad_id is None else IDS
    x = {"input_ids": ids, "decoder_input_ids": TARGET} if is_seq2seq else ids
    output = model(x)
    expected = "bfloat16" if kind is LinformerBackbone else "float32"
    assert keras.backend.standardize_dtype(output.dtype) == expected == model.compute_output_spec(x).dtype
    exact = exact_outputs(model, ids, ids != 0)
    is_probability = is_classifier and "classifier_activation" not in options
    exact = exact.softmax(dim=-1) if is_probability else exact
    real = slice(None) if is_classifier or is_seq2seq else ids != 0
    assert_roundings(numpy(output)[real], exact[real], MODEL)

    if hasattr(model, "generate"):
        generated = model.generate(ids[:, :330], max_new_tokens=6)
        assert generated.shape == (4, 7 if is_seq2seq else 336)
    if kind is LinformerCausalLM:  # in exact arithmetic, no other token would be much more likely
        logits = exact_outputs(model, generated, generated >= 0)[:, 329:-1].numpy()
        chosen = np.take_along_axis(logits, generated[:, 330:, None], axis=-1)
        assert (logits.max(axis=-1, keepdims=True) - chosen).max() < 6 * MODEL**0.5 * ROUNDING * logits.std()

    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy("float32")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(x)), numpy(output))
    y = np.arange(4) % 2 if is_classifier else numpy(output) if kind is LinformerBackbone else ids
    loss = keras.losses.SparseCategoricalCrossentropy(not is_probability, ignore_class=None if is_classifier else 0)
    loaded.compile(keras.optimizers.SGD(1.0), "mse" if kind is LinformerBackbone else loss)
    assert_every_weight_learns(randomize(loaded), x, y)
    assert np.isfinite(numpy(loaded(x)).astype("float32")).all()


def test_the_gradients_of_frequent_tokens_are_close_to_float64():
    ids, types = np.random.default_rng(3).integers(1, 4, (2, LENGTH)), np.zeros((2, LENGTH), int)
    model = LinformerBackbone(**{**SIZES, "max_len": LENGTH, "dropout": 0.0}, token_types=2, dtype="mixed_bfloat16")
    torch_model = to_torch(model).double()
    model.compile(keras.optimizers.SGD(1.0), "mse")
    y = normal(2, LENGTH, 16) + 1
    model.train_on_batch({"input_ids": ids, "token_type_ids": types}, y)
    states = torch_model(torch.from_numpy(ids), token_type_ids=torch.from_numpy(types)).last_hidden_state
    (states - torch.from_numpy(y)).square().mean().backward()
    after = dict(to_torch(model).double().named_parameters())
    for name, parameter in torch_model.named_parameters():
        if "embeddings" in name and "position" not in name:
            assert_roundings((parameter - after[name]).detach().numpy(), parameter.grad, MODEL)
