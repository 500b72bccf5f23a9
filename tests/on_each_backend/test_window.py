"""Window attention: equal to PyTorch with the same weights, and to full attention."""

import keras
import numpy as np
import pytest
import torch
from battery import (
    COMBINATIONS,
    IS_TORCH,
    PROJECTIONS,
    assert_close,
    cases,
    normal,
    numpy,
    only_torch,
    randomize,
    run_layer_test,
)

import linformer_kit
from linformer_kit.keras import LinearMultiHeadAttention, to_torch
from linformer_kit.keras.projection import make_projection
from linformer_kit.models.window_linformer import DistanceBias

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
not_jax = pytest.mark.skipif(
    not (IS_TORCH or IS_TENSORFLOW), reason="JAX compiles every operation; the test of a graph covers it"
)

WINDOW = 3
# no padding, padding in between, on the left, on the right (the real tokens fit into the window), nothing else
MASK = np.stack([np.arange(19) >= 0, np.arange(19) % 3 != 1, np.arange(19) > 5, np.arange(19) < 4, np.arange(19) < 0])


def built(**options):
    options = {"projection_dim": 5, "max_length": 24, "window_length": WINDOW, "global_tokens": 2, **options}
    layer = LinearMultiHeadAttention(num_heads=3, key_dim=4, **options)
    layer.build((None, None, 12), (None, None, 12))
    return randomize(layer)


def assert_equals_pytorch(layer, shared=None, torch_shared=None):
    """Outputs and scores, with padding that holds NaN; the last example has only padding."""
    x = normal(5, 19, 12)
    x[~MASK] = np.nan
    with torch.no_grad():
        expected, weights = to_torch(layer)(
            torch.from_numpy(x), mask=torch.from_numpy(MASK), projection=torch_shared, need_weights=True
        )
    output, scores = layer(x, x, value_mask=MASK, return_attention_scores=True, shared_projection=shared)
    has_output = MASK | ~MASK.any(axis=1, keepdims=True)  # elsewhere, outputs at padding are undefined
    assert_close(numpy(output)[has_output], expected.numpy()[has_output])
    np.testing.assert_array_equal(numpy(output)[4], np.broadcast_to(numpy(layer.output_dense.bias), (19, 12)))
    assert_close(layer(x, x, value_mask=MASK, shared_projection=shared), output)
    assert scores.shape == weights.shape
    by_query, torch_by_query = (np.swapaxes(np.array(each), 1, 2) for each in (numpy(scores), weights.numpy()))
    assert_close(by_query[MASK], torch_by_query[MASK])


@not_jax
@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS if IS_TORCH else [("linear", "none"), ("mean", "kv")])
def test_it_equals_pytorch_with_padding_anywhere(projection, sharing):
    assert_equals_pytorch(built(projection=projection, sharing=sharing, rescale=projection == "linear"))


@not_jax
@pytest.mark.parametrize(
    "options",
    cases(
        {"projection_dim": 0, "global_tokens": 0},
        {"projection": "mean", "distance_bias": True},
        torch=[
            {"projection_dim": 0, "sharing": "layerwise"},
            {"global_tokens": 0},
            {"global_tokens": 20, "projection": "dynamic"},
            {"window_length": 1, "projection": "mean"},
            {"window_length": 7},
            {"window_length": 1, "sharing": "none", "distance_bias": True},
            {"window_length": 10, "projection_dim": 0, "distance_bias": True},  # all tokens are in the window
        ],
    ),
    ids=str,
)
def test_it_equals_pytorch_with_other_sizes(options):
    assert_equals_pytorch(built(**options))


@not_jax
@pytest.mark.parametrize(("window", "heads"), cases((2, 9), torch=[(1, 3)]))  # more heads than neighbors
def test_a_new_distance_bias_equals_that_of_pytorch(window, heads):
    layer = LinearMultiHeadAttention(heads, 4, 0, window_length=window, distance_bias=True)
    layer.build((None, None, 12), (None, None, 12))
    np.testing.assert_array_equal(numpy(layer.distance_weight), DistanceBias(window, heads).weight.detach().numpy())


@only_torch
def test_a_layerwise_projection_is_an_argument_of_the_call():
    layer, options = built(sharing="layerwise", projection="dynamic"), {"projection": "dynamic", "embed_dim": 12}
    shared = make_projection(**options, projected_length=5, max_length=24, sharing="layerwise", num_heads=3)
    shared.build()
    torch_shared = linformer_kit.make_projection(**options, projected_length=5, max_length=24, sharing="layerwise")
    with torch.no_grad():
        torch_shared.weight.copy_(torch.from_numpy(numpy(shared.weight)))
    assert_equals_pytorch(layer, shared, torch_shared)
    x = normal(1, 2, 12)
    with pytest.raises(ValueError, match="shared_projection is missing"):  # although all tokens are in the window
        layer(x, x)


@not_jax
@pytest.mark.parametrize("projection", PROJECTIONS if IS_TORCH else ["linear"])
def test_an_input_that_fits_into_the_window_has_full_attention(projection):
    layer, x = built(projection=projection, window_length=10), normal(5, 19, 12)
    full = LinearMultiHeadAttention(3, 4, None)
    full.build(x.shape, x.shape)
    full.set_weights(layer.get_weights()[: len(full.weights)])
    expected = numpy(full(x, x, value_mask=MASK))
    for training in (False, True):  # two implementations
        assert_close(numpy(layer(x, x, value_mask=MASK, training=training))[MASK], expected[MASK])
    # four real tokens fit into two blocks, although 19 do not
    short = built(projection=projection, global_tokens=0)
    short.set_weights(layer.get_weights())
    assert_close(short(x, x, lengths=MASK.sum(axis=1))[3, :4], expected[3, :4])


@only_torch
def test_all_weights_have_a_gradient_for_inputs_that_fit_into_the_window():
    layer, x = built(window_length=10), torch.from_numpy(normal(2, 19, 12))
    layer(x, x, training=True).square().sum().backward()
    assert all(variable.value.grad is not None for variable in layer.trainable_variables)


@not_jax
def test_large_scores_do_not_reveal_what_is_hidden():
    layer, full = built(projection_dim=0, distance_bias=True), LinearMultiHeadAttention(3, 4, None)
    full.build((None, None, 12), (None, None, 12))
    full.set_weights([weight for weight in layer.get_weights() if weight.shape != layer.distance_weight.shape])
    layer.distance_weight.assign(np.full(layer.distance_weight.shape, -300.0))  # a constant changes no weight
    x, lengths = normal(1, 19, 12), np.array([4])
    assert_close(layer(x, x, lengths=lengths)[:, :4], full(x, x, lengths=lengths)[:, :4])


@only_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_float16"])
def test_scores_are_float32_in_half_precision(dtype, monkeypatch):
    layer, x = built(projection="mean", dtype=dtype), normal(2, 19, 12)
    dtypes, concatenate = [], keras.ops.concatenate

    def spy(parts, axis=-1):
        if len(parts) == 2 and len(parts[0].shape) == 5:  # near and far scores of each block
            dtypes.extend(keras.backend.standardize_dtype(part.dtype) for part in parts)
        return concatenate(parts, axis=axis)

    monkeypatch.setattr(keras.ops, "concatenate", spy)
    layer(x, x, return_attention_scores=True)
    assert dtypes == ["float32", "float32"]


def test_outputs_and_gradients_in_a_graph_are_those_of_pytorch():
    """One step of gradient descent with one layer of each kind, in both frameworks."""
    layers = [built(projection=projection) for projection in (PROJECTIONS if IS_TORCH else ("linear", "mean"))]
    layers.append(built(projection_dim=0, distance_bias=True))
    torch_layers = [to_torch(layer) for layer in layers]
    inputs, mask = keras.Input((19, 12)), keras.Input((19,), dtype="bool")
    is_real = keras.ops.cast(mask, "float32")[..., None]
    model = keras.Model([inputs, mask], [is_real * layer(inputs, inputs, value_mask=mask) for layer in layers])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    x, y = normal(5, 19, 12), normal(5, 19, 12)
    _, *losses = model.train_on_batch([x, MASK], [y] * len(layers))
    tokens, target, real = (torch.from_numpy(array) for array in (x, y, MASK))
    for layer, torch_layer, loss in zip(layers, torch_layers, losses, strict=True):
        torch_loss = (real[..., None] * torch_layer(tokens, mask=real) - target).square().mean()
        torch_loss.backward()
        assert_close(loss, torch_loss.detach())
        after = to_torch(layer).state_dict()
        for name, parameter in torch_layer.named_parameters():
            assert_close((parameter.detach() - after[name]) / 0.5, parameter.grad)
            assert name == "key.bias" or parameter.grad.abs().max() > 1e-4, name


@not_jax
@pytest.mark.parametrize(
    "options", cases({"projection": "mean", "distance_bias": True}, torch=[{"projection_dim": 0}, {"use_gate": True}])
)
def test_it_behaves_like_a_keras_layer(options, tmp_path):
    sizes = {"num_heads": 3, "key_dim": 4, "projection_dim": 5, "window_length": WINDOW, "global_tokens": 2}
    run_layer_test({**sizes, **options}, normal(3, 19, 12), tmp_path)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="only TensorFlow has graphs with symbolic lengths")
def test_lengths_may_be_unknown_in_a_graph():
    import tensorflow as tf

    layers = [built(projection=projection) for projection in ("linear", "conv", "mean")]
    layers += [built(projection_dim=0), built(projection="mean", distance_bias=True)]

    @tf.function(input_signature=[tf.TensorSpec((None, None, 12)), tf.TensorSpec((None, None), tf.bool)])
    def graph(x, mask):
        outputs = [layer(x, x, value_mask=mask) for layer in layers]
        return outputs, tf.gradients(outputs, x)[0]

    for length in (1, 19):
        x = normal(5, length, 12)
        outputs, gradient = graph(x, MASK[:, :length])
        for layer, output in zip(layers, outputs, strict=True):
            assert_close(output, layer(x, x, value_mask=MASK[:, :length]))
        assert np.isfinite(gradient.numpy()).all()


def test_scores_have_a_column_for_each_token_of_the_window_and_each_row():
    inputs = keras.Input((16, 12))
    for options, columns in (({"projection": "mean"}, 3 * WINDOW + 2 + 5), ({"projection_dim": 0}, 3 * WINDOW + 2)):
        _, scores = built(**options)(inputs, inputs, return_attention_scores=True)
        assert tuple(scores.shape) == (None, 3, 16, columns)


@only_torch
def test_dropout_is_applied_to_the_scores_in_training_only():
    layer, x = built(dropout=0.5, seed=11), np.repeat(normal(1, 19, 12), 400, axis=0)
    output, scores = layer(x, x, return_attention_scores=True)
    dropped, same_scores = layer(x, x, return_attention_scores=True, training=True)
    assert_close(same_scores, scores)
    deviation = numpy(dropped).std(axis=0)
    assert deviation.min() > 1e-2
    assert (np.abs(numpy(dropped).mean(axis=0) - numpy(output)[0]) < 6 * deviation / 400**0.5).all()


@only_torch
def test_attention_over_some_of_several_axes():
    x, options = normal(2, 3, 9, 12), {"projection_dim": 2, "window_length": 2, "global_tokens": 1}
    rows = LinearMultiHeadAttention(3, 4, **options, attention_axes=2)
    output, scores = rows(x, x, return_attention_scores=True)
    flat, flat_x = LinearMultiHeadAttention(3, 4, **options), x.reshape(6, 9, 12)
    flat.build((None, 9, 12), (None, 9, 12))
    flat.set_weights(rows.get_weights())
    flat_output, flat_scores = flat(flat_x, flat_x, return_attention_scores=True)
    assert_close(numpy(output).reshape(6, 9, 12), flat_output)
    assert_close(numpy(scores).reshape(6, 3, 9, 9), flat_scores)


def test_a_context_raises_an_error():
    layer, x, other = built(), normal(2, 19, 12), normal(2, 19, 12)
    message = "the {} is another tensor than the query, but window_length=3.* pass the query as {}"
    with pytest.raises(ValueError, match=message.format("value", "value")):
        layer(x, other)
    with pytest.raises(ValueError, match=message.format("key", "key")):
        layer(query=x, value=x, key=other)
    with pytest.raises(ValueError, match=message.format("value", "value")):
        layer(keras.Input((19, 12)), keras.Input((19, 12)))
