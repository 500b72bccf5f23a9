"""What the tests on each backend share: layers read into the float64 reference, and what any layer of Keras must do."""

from functools import partial

import keras
import numpy as np

from linformer_kit import reference
from linformer_kit.keras import LinearMultiHeadAttention
from linformer_kit.keras import projection as projections

PROJECTIONS = ("linear", "dynamic", "conv", "mean", "max", "random")
# every pair that means something for a layer of its own
COMBINATIONS = [
    (projection, sharing)
    for projection in PROJECTIONS
    for sharing in ("none", "headwise", "kv")
    if not (sharing == "none" and projection in ("mean", "max"))
]
RNG = np.random.default_rng(0)


def numpy(tensor):
    return np.array(keras.ops.convert_to_numpy(tensor))


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


def randomise(layer):
    """Fill every weight, biases and norms too, so that none is zero or one by accident."""
    for weight in layer.weights:
        if "seed_generator" not in weight.path:
            weight.assign(normal(*weight.shape) * (weight.shape[-1] ** -0.5 if len(weight.shape) > 1 else 1.0))
    return layer


def affine(dense, inputs):
    """`kernel` with this many input features, as (out, in), and the bias."""
    kernel = numpy(dense.kernel).astype("float64").reshape(inputs, -1).T
    return reference.Affine(kernel, None if dense.bias is None else numpy(dense.bias).astype("float64").reshape(-1))


def rows_function(projection, matrix):
    """The reference of one matrix (E or F, of one head or all)."""
    weight = numpy(projection.weight).astype("float64") if projection.weights else None
    match projection:
        case projections.LinearProjection():
            return partial(reference.matrix_rows, E=weight[:, matrix], rescale=projection.rescale)
        case projections.DynamicProjection():
            return partial(reference.dynamic_rows, weight=weight[:, matrix])
        case projections.ConvProjection():
            return partial(reference.conv_rows, taps=weight[matrix], rescale=projection.rescale)
        case projections.MeanProjection():
            return partial(reference.mean_rows, projected_length=projection.projected_length)
        case projections.MaxProjection():
            return partial(reference.max_rows, projected_length=projection.projected_length)
    raise TypeError(projection)


def reference_layer(layer, shared=None):
    """A layer, weight for weight, as the reference sees it."""
    heads, sharing, projection = layer.num_heads, layer.sharing, layer.projection or shared
    numbers = {"none": list(range(2 * heads)), "headwise": [0] * heads + [1] * heads}.get(sharing, [0] * 2 * heads)
    if projection.matrices == 1:
        numbers = [0] * 2 * heads
    functions = [rows_function(projection, number) for number in numbers]
    width = layer.query_dense.kernel.shape[0]
    return reference.Layer(
        *(affine(dense, width) for dense in (layer.query_dense, layer.key_dense, layer.value_dense)),
        affine(layer.output_dense, heads * layer.value_dim),
        num_heads=heads,
        head_dim=layer.key_dim,
        key_rows=functions[:heads],
        value_rows=functions[heads:],
    )


def reference_output(layer, x, mask=None, shared=None):
    """The reference's outputs for a padded batch: each example alone, reduced to its real tokens."""
    x = x.astype("float64")
    tokens = [example if mask is None else example[mask[number]] for number, example in enumerate(x)]
    of_layer = reference_layer(layer, shared)
    return np.stack([reference.linformer_attention(x[number], tokens[number], of_layer)[0] for number in range(len(x))])


def assert_close(one, other, tolerance=2e-5):
    one, other = numpy(one).astype("float64"), numpy(other).astype("float64")
    assert one.shape == other.shape
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(1.0, np.abs(other).max()))


def assert_all_is_learnt(model, x, y):
    """An epoch changes every weight that can be learnt."""
    before = [numpy(weight) for weight in model.trainable_weights]
    model.fit(x, y, verbose=0)
    for weight, old in zip(model.trainable_weights, before, strict=True):
        # the softmax does not see what all keys have in common
        if "key/bias" not in weight.path:
            assert np.abs(numpy(weight) - old).max() > 0, weight.path


def model_of(layer, shape, **call):
    """`x -> layer(x, x)` as a functional model."""
    inputs = keras.Input(shape)
    return keras.Model(inputs, layer(inputs, inputs, **call))


def run_layer_test(options, x, tmp_path):
    """Build, symbolic and eager call, fit, serialisation, mixed precision: what any layer of Keras must do."""
    layer = LinearMultiHeadAttention(**options)
    model = model_of(layer, x.shape[1:])  # builds, and calls it with symbols
    eager = layer(x, x)
    assert tuple(model.output_shape[1:]) == tuple(eager.shape[1:])
    assert_close(model.predict(x, verbose=0), eager)

    # its configuration makes the same layer again
    twin = LinearMultiHeadAttention.from_config(layer.get_config())
    assert twin.get_config() == layer.get_config()
    twin.build(x.shape, x.shape)
    assert [weight.shape for weight in twin.weights] == [weight.shape for weight in layer.weights]
    twin.set_weights(layer.get_weights())
    assert_close(twin(x, x), eager)

    # it learns, in the graph; a step reaches every weight that can be learnt
    model.compile(keras.optimizers.SGD(0.1), "mse")
    assert_all_is_learnt(model, x, normal(*eager.shape))

    # it is saved and loaded
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_close(loaded.predict(x, verbose=0), model.predict(x, verbose=0))

    # it computes in half precision, and keeps its weights in float32
    for policy in ("mixed_bfloat16", "mixed_float16"):
        half = LinearMultiHeadAttention.from_config({**layer.get_config(), "dtype": policy})
        output = half(x, x)
        assert keras.backend.standardize_dtype(output.dtype) == policy.removeprefix("mixed_")
        assert all(
            keras.backend.standardize_dtype(weight.dtype) in ("float32", "int32", "uint32") for weight in half.weights
        )
        half.set_weights(twin.get_weights())
        np.testing.assert_allclose(numpy(half(x, x)).astype("float32"), numpy(eager), atol=0.05)
