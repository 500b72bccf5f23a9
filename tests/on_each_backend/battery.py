"""Shared by the tests on each backend: the float64 reference of a layer, and the battery for every Keras layer.

JAX compiles each operation for each shape, so tests that run eagerly use the same shapes wherever they can.
"""

from functools import partial
from unittest.mock import patch

import keras
import numpy as np
import pytest

from linformer_kit import reference
from linformer_kit.keras import LinearMultiHeadAttention
from linformer_kit.keras.projection import Projection

IS_TORCH = keras.backend.backend() == "torch"
PROJECTIONS = tuple(Projection.kinds)
# every valid pair for a layer with its own projection
COMBINATIONS = [
    (projection, sharing)
    for projection, cls in Projection.kinds.items()
    for sharing in ("none", "headwise", "kv")
    if cls.has_matrices or sharing != "none"
]
ORDERS = ("per head", "folded")
RNG = np.random.default_rng(0)


# for code that is the same on every backend: PyTorch compiles nothing, so it runs these tests fastest
only_torch = pytest.mark.skipif(not IS_TORCH, reason="independent of the backend; runs on PyTorch")


def cases(*everywhere, torch=()):
    """Parameters of a test: those for every backend, and those that test code independent of the backend."""
    return [*everywhere, *(torch if IS_TORCH else ())]


def some_sharings():
    """All combinations on PyTorch; elsewhere every projection, with one sharing each in turn."""
    by_projection = [[pair for pair in COMBINATIONS if pair[0] == projection] for projection in PROJECTIONS]
    return COMBINATIONS if IS_TORCH else [pairs[number % len(pairs)] for number, pairs in enumerate(by_projection)]


def in_order(order):
    """Compute the products with W_Q and W_O in this order, whatever is cheaper."""
    return patch.object(LinearMultiHeadAttention, "_query_order", lambda *_: order)


def numpy(tensor):
    return np.array(keras.ops.convert_to_numpy(tensor))


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


def randomize(layer):
    """Fill every weight, including biases and norms, so that none is zero or one by accident."""
    for weight in layer.weights:
        if "seed_generator" not in weight.path:
            weight.assign(normal(*weight.shape) * (weight.shape[-1] ** -0.5 if len(weight.shape) > 1 else 1.0))
    return layer


def affine(dense, inputs):
    """The kernel for this many input features as (out, in), and the bias."""
    kernel = numpy(dense.kernel).astype("float64").reshape(inputs, -1).T
    return reference.Affine(kernel, None if dense.bias is None else numpy(dense.bias).astype("float64").reshape(-1))


def rows_function(projection, matrix):
    """The reference of one matrix (E or F, of one head or all heads)."""
    return partial(
        reference.ROWS[projection.kind],
        weight=numpy(projection.weight).astype("float64") if projection.weights else None,
        matrix=matrix,
        projected_length=projection.options["projected_length"],
        rescale=projection.options["rescale"],
    )


def reference_layer(layer, shared=None):
    """A layer, weight for weight, converted for the reference."""
    heads, sharing, projection = layer.num_heads, layer.sharing, layer.projection or shared
    numbers = {"none": list(range(2 * heads)), "headwise": [0] * heads + [1] * heads}.get(sharing, [0] * 2 * heads)
    if projection.matrices == 1:
        numbers = [0] * 2 * heads
    functions = [rows_function(projection, number) for number in numbers]
    biases, kernels = [], []
    if projection.kind == "affine":
        bias_MK = numpy(projection.bias).astype("float64")
        biases = [bias_MK[number] for number in numbers]
    if projection.kind == "head_conv":
        weight_MWDD, bias_MD = (numpy(each).astype("float64") for each in (projection.weight, projection.bias))
        kernels = [reference.Kernel(weight_MWDD[number], bias_MD[number]) for number in numbers]
    width = layer.query_dense.kernel.shape[0]
    return reference.Layer(
        *(affine(dense, width) for dense in (layer.query_dense, layer.key_dense, layer.value_dense)),
        affine(layer.output_dense, heads * layer.value_dim),
        num_heads=heads,
        head_dim=layer.key_dim,
        key_rows=functions[:heads],
        value_rows=functions[heads:],
        key_bias=biases[:heads],
        value_bias=biases[heads:],
        key_kernels=kernels[:heads],
        value_kernels=kernels[heads:],
    )


def reference_output(layer, x, mask=None, shared=None):
    """The outputs of the reference for a padded batch: one example at a time, reduced to its real tokens."""
    x = x.astype("float64")
    tokens = [example if mask is None else example[mask[number]] for number, example in enumerate(x)]
    converted = reference_layer(layer, shared)
    return np.stack(
        [reference.linformer_attention(x[number], tokens[number], converted)[0] for number in range(len(x))]
    )


def assert_close(actual, expected, tolerance=2e-5):
    actual, expected = numpy(actual).astype("float64"), numpy(expected).astype("float64")
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max()))


def assert_every_weight_learns(model, x, y):
    """A training step changes every trainable weight."""
    before = [numpy(weight) for weight in model.trainable_weights]
    model.fit(x, y, verbose=0)
    for weight, old in zip(model.trainable_weights, before, strict=True):
        # the softmax is invariant to a constant added to all keys
        if "key/bias" not in weight.path:
            assert np.abs(numpy(weight) - old).max() > 0, weight.path


def model_of(layer, shape, **call):
    """`x -> layer(x, x)` as a functional model."""
    inputs = keras.Input(shape)
    return keras.Model(inputs, layer(inputs, inputs, **call))


def run_layer_test(options, x, tmp_path, is_compiled=False):
    """The battery for any Keras layer: build, symbolic and eager call, configuration, saving, half precision.

    With `is_compiled` also `predict` and `fit`, each of which compiles a graph.
    """
    layer = LinearMultiHeadAttention(**options)
    model = model_of(layer, x.shape[1:])  # builds the layer and calls it symbolically
    eager = layer(x, x)
    assert tuple(model.output_shape[1:]) == tuple(eager.shape[1:])

    # the configuration creates the same layer again
    copy = LinearMultiHeadAttention.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    copy.build(x.shape, x.shape)
    assert [weight.shape for weight in copy.weights] == [weight.shape for weight in layer.weights]
    copy.set_weights(layer.get_weights())
    assert_close(copy(x, x), eager)

    if is_compiled:
        assert_close(model.predict(x, verbose=0), eager)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        assert_every_weight_learns(model, x, normal(*eager.shape))

    model.save(tmp_path / "model.keras")
    assert_close(keras.models.load_model(tmp_path / "model.keras")(x), model(x))

    # it computes in half precision, and keeps its weights in float32
    for policy in ("mixed_bfloat16", "mixed_float16") if is_compiled else ("mixed_float16",):
        half = LinearMultiHeadAttention.from_config({**layer.get_config(), "dtype": policy})
        half.build(x.shape, x.shape)
        dtypes = {keras.backend.standardize_dtype(weight.dtype) for weight in half.weights}
        assert dtypes <= {"float32", "int32", "uint32"}
        half.set_weights(copy.get_weights())
        output = half(x, x)
        assert keras.backend.standardize_dtype(output.dtype) == policy.removeprefix("mixed_")
        np.testing.assert_allclose(numpy(output).astype("float32"), numpy(eager), atol=0.05)
