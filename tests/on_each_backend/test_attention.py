"""The layer against the float64 reference, against MultiHeadAttention, and as a Keras layer."""

import warnings

import keras
import numpy as np
import pytest
from battery import (
    COMBINATIONS,
    IS_TORCH,
    ORDERS,
    PROJECTIONS,
    assert_close,
    cases,
    in_order,
    model_of,
    normal,
    numpy,
    only_torch,
    randomize,
    reference_output,
    run_layer_test,
    some_sharings,
)

from linformer_kit import LinformerAttention
from linformer_kit.keras import LinearMultiHeadAttention
from linformer_kit.keras.projection import make_projection


def built(length, width=12, **options):
    layer = LinearMultiHeadAttention(**{"num_heads": 3, "key_dim": 4, "projection_dim": 5, **options})
    layer.build((None, length, width), (None, length, width))
    return randomize(layer)


def assert_equals_the_reference(layer, x, mask):
    expected, masked = reference_output(layer, x), reference_output(layer, x, mask)
    for order in ORDERS:
        with in_order(order):
            assert_close(layer(x, x), expected)
            assert_close(layer(x, x, value_mask=mask), masked)


@pytest.mark.parametrize(("projection", "sharing"), some_sharings())
def test_it_equals_the_reference_with_padding_anywhere(projection, sharing):
    layer, x = built(24, projection=projection, sharing=sharing), normal(3, 19, 12)
    mask = np.random.default_rng(1).random((3, 19)) > 0.4
    mask[0], mask[2] = True, np.arange(19) == 3
    assert_equals_the_reference(layer, x, mask)


@pytest.mark.parametrize(
    ("projection", "sharing"), cases(("linear", "headwise"), ("conv", "none"), torch=[("random", "kv")])
)
def test_with_rescale_it_equals_the_reference(projection, sharing):
    layer, x = built(24, projection=projection, sharing=sharing, rescale=True), normal(3, 19, 12)
    assert_equals_the_reference(layer, x, np.arange(19) < [[19], [7], [1]])


def test_a_layerwise_projection_is_an_argument_of_the_call():
    layer, x = built(24, sharing="layerwise"), normal(3, 19, 12)
    shared = make_projection(embed_dim=12, max_length=24, projected_length=5, sharing="layerwise", num_heads=3)
    shared.build()
    assert_close(layer(x, x, shared_projection=shared), reference_output(layer, x, shared=shared))
    with pytest.raises(ValueError, match="shared_projection is missing but sharing='layerwise'"):
        layer(x, x)
    with pytest.raises(ValueError, match="shared_projection is given but sharing='headwise'"):
        built(24)(x, x, shared_projection=shared)


@pytest.mark.parametrize(
    ("projection", "order"), cases(("dynamic", "per head"), ("linear", "folded"), torch=[("conv", "folded")])
)
def test_gradients_are_those_of_the_reference(projection, order):
    """A step of gradient descent against finite differences of the float64 reference, in one direction per weight."""
    layer, x, rate = built(8, projection=projection), normal(2, 8, 12), 1e-3
    y = normal(2, 8, 12)
    model = model_of(layer, (8, 12))
    model.compile(keras.optimizers.SGD(rate), "mse")
    before = [numpy(weight).astype("float64") for weight in layer.weights]
    with in_order(order):
        model.train_on_batch(x, y)
    gradients = [(old - numpy(weight)) / rate for old, weight in zip(before, layer.weights, strict=True)]
    for number, gradient in enumerate(gradients):
        direction = np.sign(gradient)  # the steepest, so that float32 resolves it
        losses = []
        for step in (2e-3, -2e-3):
            for weight, old in zip(layer.weights, before, strict=True):
                weight.assign(old)
            layer.weights[number].assign(before[number] + step * direction)
            losses.append(((reference_output(layer, x) - y) ** 2).mean())
        assert (losses[0] - losses[1]) / 4e-3 == pytest.approx((gradient * direction).sum(), rel=0.03, abs=2e-3)


@pytest.mark.parametrize(
    "options",
    cases(
        {},
        {
            "projection": "max",
            "dropout": 0.1,
            "kernel_initializer": "he_normal",
            "bias_initializer": "ones",
            "kernel_regularizer": "l2",
            "bias_regularizer": "l1",
            "kernel_constraint": "max_norm",
            "use_gate": True,
            "seed": 7,
        },
        torch=[
            {"projection": "dynamic"},
            {"projection": "conv", "sharing": "none"},
            {"projection": "mean", "value_dim": 6, "output_shape": 10, "use_bias": False},
        ],
    ),
)
def test_it_behaves_like_a_keras_layer(options, tmp_path):
    sizes = {"num_heads": 3, "key_dim": 4, "projection_dim": 5}
    run_layer_test({**sizes, **options}, normal(3, 19, 12), tmp_path, is_compiled=not options)


def test_regularization_losses_equal_those_of_multi_head_attention():
    x = normal(3, 19, 12)
    options = {
        "num_heads": 3,
        "key_dim": 4,
        "kernel_regularizer": "l2",
        "bias_regularizer": "l1",
        "bias_initializer": "ones",
    }
    full = keras.layers.MultiHeadAttention(**options)
    full(x, x)
    for sharing in ("headwise", "none"):
        ours = LinearMultiHeadAttention(**options, projection_dim=5, sharing=sharing)
        ours.build(x.shape, x.shape)
        for name in ("query_dense", "key_dense", "value_dense", "output_dense"):
            getattr(ours, name).set_weights(getattr(full, name).get_weights())
        ours(x, x)
        assert float(sum(map(numpy, ours.losses))) == pytest.approx(float(sum(map(numpy, full.losses))), rel=1e-5)


def test_without_a_projection_it_equals_multi_head_attention():
    x, z, mask = normal(2, 9, 8), normal(2, 7, 8), np.arange(7) < [[7], [4]]
    options = {"num_heads": 2, "key_dim": 4, "value_dim": 4, "output_shape": 5, "bias_initializer": "ones"}
    full, ours = keras.layers.MultiHeadAttention(**options), LinearMultiHeadAttention(**options, projection_dim=None)
    for layer in (full, ours):
        layer(x, x)
    ours.set_weights(full.get_weights())
    assert ours.count_params() == full.count_params()
    for query, value, call in (
        (x, x, {}),
        (x, z, {"value_mask": mask}),
        (x, z, {"attention_mask": normal(2, 9, 7) > 0}),
        (x, x, {"use_causal_mask": True}),
        (x, z, {"return_attention_scores": True}),
    ):
        expected, got = full(query, value, **call), ours(query, value, **call)
        for one, other in zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]:
            np.testing.assert_array_equal(numpy(one), numpy(other))


@only_torch
def test_the_parameter_counts_of_the_original_keras_implementation():
    for sharing, parameters in (("kv", 1_179_904), ("headwise", 1_307_904)):
        layer = LinearMultiHeadAttention(num_heads=8, key_dim=128, projection_dim=64, sharing=sharing)
        layer.build((None, 2000, 256), (None, 2000, 256))
        assert layer.count_params() == parameters


def test_scores_have_one_column_per_row():
    layer, x = built(24), normal(3, 19, 12)
    output, scores = layer(x, x, return_attention_scores=True)
    assert_close(output, layer(x, x))
    assert tuple(scores.shape) == (3, 3, 19, 5)
    assert_close(numpy(scores).sum(axis=-1), np.ones((3, 3, 19)))
    with in_order("folded"):
        for folded, per_head in zip(layer(x, x, return_attention_scores=True), (output, scores), strict=True):
            assert_close(folded, per_head)
    inputs = keras.Input((16, 12))
    assert [tuple(spec.shape) for spec in layer(inputs, inputs, return_attention_scores=True)] == [
        (None, 16, 12),
        (None, 3, 16, 5),
    ]


@only_torch
@pytest.mark.parametrize(
    ("queries", "rows", "options"),
    [
        (19, 4, {}),
        (19, 5, {}),
        (4096, 32, {"num_heads": 8, "key_dim": 64}),
        (4096, 64, {"num_heads": 8, "key_dim": 64}),
        (1, 5, {}),
        (19, 3, {"value_dim": 2, "output_shape": 40}),
        (19, 3, {"value_dim": 40, "output_shape": 2}),
        (40, 3, {"value_dim": 40, "output_shape": 2}),
    ],
)
def test_the_order_of_the_queries_has_the_fewest_multiply_adds(queries, rows, options):
    layer, width = built(rows, projection_dim=rows, **options), 12
    heads, dim, value_dim = layer.num_heads, layer.key_dim, layer.value_dim
    outputs = layer.output_dense.kernel.shape[-1]
    products = {
        "per head": [
            (queries, width, heads * dim),
            (heads * queries, dim, rows),
            (heads * queries, rows, value_dim),
            (queries, heads * value_dim, outputs),
        ],
        "folded": [
            (heads * rows, dim, width),
            (queries, width, heads * rows),
            (heads * rows, value_dim, outputs),
            (queries, heads * rows, outputs),
        ],
    }
    cheapest = min(products, key=lambda order: sum(n * k * m for n, k, m in products[order]))
    x, keys = np.zeros((1, queries, width), "float32"), np.zeros((1, rows, heads, dim), "float32")
    assert layer._query_order(x, keys) == cheapest
    if not options and heads == 3:
        assert layer._query_order(x, keys) == LinformerAttention(12, 3)._query_order(queries, rows)


@pytest.mark.parametrize("options", [{"use_gate": True}, {"activity_regularizer": "l2"}, {"output_shape": (2, 3)}])
def test_layers_that_need_queries_or_heads_are_not_folded(options):
    x, keys = np.zeros((1, 19, 12), "float32"), np.zeros((1, 2, 3, 4), "float32")
    assert built(19)._query_order(x, keys) == "folded"
    assert built(19, **options)._query_order(x, keys) == "per head"


def test_a_folded_layer_of_uneven_widths_equals_one_per_head():
    """Also with adapters and a context, and without biases."""
    x, z = normal(3, 19, 12), normal(3, 9, 12)
    layer = LinearMultiHeadAttention(3, 4, 5, value_dim=2, output_shape=7, use_bias=False, max_length=19)
    built_on(layer, x)
    layer.query_dense.enable_lora(2)
    layer.output_dense.enable_lora(2)
    randomize(layer)
    mask = np.arange(9) < [[9], [4], [0]]
    expected = layer(x, z, value_mask=mask)
    with in_order("folded"):
        assert_close(layer(x, z, value_mask=mask), expected)


@only_torch
def test_a_folded_layer_drops_weights_in_training():
    layer, x = built(19, dropout=0.5, seed=11), np.repeat(normal(1, 19, 12), 400, axis=0)
    with in_order("folded"):
        output, scores = layer(x, x, return_attention_scores=True)
        dropped, same_scores = layer(x, x, return_attention_scores=True, training=True)
    assert_close(same_scores, scores)
    deviation = numpy(dropped).std(axis=0)
    assert deviation.min() > 1e-2
    assert (np.abs(numpy(dropped).mean(axis=0) - numpy(output)[0]) < 6 * deviation / 400**0.5).all()


@pytest.mark.parametrize("projection", PROJECTIONS if IS_TORCH else ["linear", "max"])
def test_padding_never_changes_the_output(projection):
    layer, x = built(24, projection=projection), normal(3, 19, 12)
    mask = np.arange(19) < [[19], [11], [4]]
    dirty = x.copy()
    dirty[~mask] = np.nan
    alone = layer(x[1:2, :11], x[1:2, :11])
    for call in (
        {"value_mask": mask},
        {"key_mask": mask},
        {"attention_mask": mask[:, None]},
        {"lengths": np.array([19, 11, 4])},
    ):
        assert_close(layer(x, dirty, **call)[1:2, :11], alone)
    every_query = np.repeat(mask[:, None], 19, axis=1)
    assert_close(layer(x, dirty, attention_mask=every_query)[1:2, :11], alone)
    real_queries_only = every_query & mask[:, :, None]  # as Keras combines query and key masks
    assert_close(layer(x, dirty, attention_mask=real_queries_only)[1:2, :11], alone)
    assert_close(layer(x, dirty, attention_mask=every_query[:, None])[1:2, :11], alone)
    empty = layer(x, dirty, value_mask=np.zeros((3, 19), bool))
    assert_close(empty, np.broadcast_to(numpy(layer.output_dense.bias), (3, 19, 12)))


def test_other_masks_raise_an_error_or_in_a_graph_give_nan():
    layer, x = built(6), normal(2, 6, 12)
    causal = np.tril(np.ones((2, 6, 6), bool))
    for mask in (causal, causal[0], causal[:, None]):
        with pytest.raises(ValueError, match="lets queries see different keys"):
            layer(x, x, attention_mask=mask)
    inputs, masks = keras.Input((6, 12)), keras.Input((6, 6), dtype="bool")
    model = keras.Model([inputs, masks], layer(inputs, inputs, attention_mask=masks))
    causal[1] = True  # the second example is valid
    if IS_TORCH:  # there is no graph
        with pytest.raises(ValueError, match="lets queries see different keys"):
            model.predict([x, causal], verbose=0)
        return
    output = model.predict([x, causal], verbose=0)
    assert np.isnan(output[0]).all()
    assert_close(output[1], layer(x, x)[1])


def test_a_causal_mask_raises_an_error():
    layer, x = built(6), normal(1, 6, 12)
    for query in (x, keras.Input((6, 12))):
        with pytest.raises(ValueError, match="so no mask can hide the future"):
            layer(query, query, use_causal_mask=True)


@only_torch
@pytest.mark.parametrize("options", [{}, {"projection": "mean"}, {"window_length": 1}])
def test_the_mask_of_an_embedding_is_used_and_passed_on(options):
    ids = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 0, 0, 0, 0, 0], [0, 2, 0, 7, 0, 0, 1, 0]])
    inputs = keras.Input((None,), dtype="int32")
    embedded = keras.layers.Embedding(10, 12, mask_zero=True)(inputs)
    attended = LinearMultiHeadAttention(3, 4, 5, max_length=8, **options)(embedded, embedded)
    again = LinearMultiHeadAttention(3, 4, 5, max_length=8, **options)(attended, attended)
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(again))
    together = numpy(model(ids))
    assert_close(together[1:2], model(ids[1:2, :3]))
    assert_close(together[2], together[1])


def test_key_and_value_may_differ_in_width():
    x, key, value = normal(3, 19, 12), normal(3, 9, 10), normal(3, 9, 6)
    layer = LinearMultiHeadAttention(3, 4, 5, value_dim=2)
    output = layer(x, value, key)
    assert tuple(output.shape) == (3, 19, 12)
    # E projects the keys, F the values
    E, F = (np.moveaxis(numpy(layer.projection.weight), 1, 0)[number] for number in (0, 1))
    full = LinearMultiHeadAttention(3, 4, None, value_dim=2)
    full.build(x.shape, value.shape, key.shape)
    full.set_weights(layer.get_weights()[: len(full.weights)])
    rows = (np.einsum("nk,bnc->bkc", F, value), np.einsum("nk,bnc->bkc", E, key))
    assert_close(output, full(x, *rows, return_attention_scores=True)[0])
    with pytest.raises(ValueError, match="key has width 10 and value 6, but projection='conv'"):
        LinearMultiHeadAttention(3, 4, 5, projection="conv")(x, value, key)
    with pytest.raises(ValueError, match="key has width 10 and value 6, but projection='dynamic'"):
        LinearMultiHeadAttention(3, 4, 5, projection="dynamic")(x, value, key)


@only_torch
def test_attention_over_some_of_several_axes():
    x = normal(2, 3, 5, 12)
    options = {"num_heads": 3, "key_dim": 4, "projection_dim": 2}
    rows = built_on(LinearMultiHeadAttention(**options, attention_axes=2), x)
    output, scores = rows(x, x, return_attention_scores=True)
    flat, flat_x = LinearMultiHeadAttention(**options), x.reshape(6, 5, 12)
    flat.build((None, 5, 12), (None, 5, 12))
    flat.set_weights(rows.get_weights())
    flat_output, flat_scores = flat(flat_x, flat_x, return_attention_scores=True)
    assert_close(numpy(output).reshape(6, 5, 12), flat_output)
    assert_close(numpy(scores).reshape(6, 3, 5, 2), flat_scores)
    mask = np.random.default_rng(2).random((2, 3, 5)) > 0.3
    masked = flat(flat_x, flat_x, value_mask=mask.reshape(6, 5))
    assert_close(numpy(rows(x, x, value_mask=mask)).reshape(6, 5, 12), masked)

    everything = built_on(LinearMultiHeadAttention(**options), x)
    flat = LinearMultiHeadAttention(**options)
    flat.build((None, 15, 12), (None, 15, 12))
    flat.set_weights(everything.get_weights())
    assert_close(numpy(everything(x, x)).reshape(2, 15, 12), flat(x.reshape(2, 15, 12), x.reshape(2, 15, 12)))
    full = keras.layers.MultiHeadAttention(3, 4, attention_axes=(1, 2))
    ours = LinearMultiHeadAttention(3, 4, None, attention_axes=(1, 2))
    for layer in (full, ours):
        layer(x, x)
    ours.set_weights(full.get_weights())
    assert_close(ours(x, x), full(x, x))
    inputs = keras.Input((3, 5, 12))
    symbolic = rows(inputs, inputs, return_attention_scores=True)
    assert [tuple(spec.shape) for spec in symbolic] == [(None, 3, 5, 12), (None, 3, 3, 5, 2)]


def built_on(layer, x):
    layer(x, x)
    return randomize(layer)


def test_dropout_is_active_in_training_only_and_follows_its_seed():
    x = normal(3, 19, 12)

    def made():
        keras.utils.set_random_seed(3)
        layer = LinearMultiHeadAttention(3, 4, 5, dropout=0.5, seed=11)
        layer(x, x)
        return layer

    layer = made()
    assert_close(layer(x, x, training=False), layer(x, x))
    one, other = numpy(layer(x, x, training=True)), numpy(layer(x, x, training=True))
    assert np.abs(one - other).max() > 1e-3
    assert np.abs(one - numpy(layer(x, x))).max() > 1e-3
    assert_close(made()(x, x, training=True), one)


# in a TensorFlow graph that is not compiled by XLA, lengths are symbolic
@pytest.mark.parametrize("jit_compile", [False, "auto"] if keras.backend.backend() == "tensorflow" else ["auto"])
def test_lengths_may_be_unknown_in_a_graph(jit_compile):
    """All projections are outputs of one model: one graph to compile."""
    layers = [LinearMultiHeadAttention(3, 4, 5, max_length=24, projection=projection) for projection in PROJECTIONS]
    inputs = keras.Input((None, 12))
    model = keras.Model(inputs, [layer(inputs, inputs) for layer in layers])
    model.compile("sgd", "mse", jit_compile=jit_compile)
    for length in (3, 19):
        x = normal(3, length, 12)
        for layer, output in zip(layers, model.predict(x, verbose=0), strict=True):
            assert_close(output, layer(x, x))
            assert np.isfinite(output).all()  # also after a training step
        # compiled for this length; more tokens than rows are trained below, with every sharing
        if length == 3 or IS_TORCH or not jit_compile:
            assert np.isfinite(model.train_on_batch(x, [x] * len(layers))).all()


def test_it_may_be_built_while_a_graph_is_traced():
    class Lazy(keras.Model):
        def __init__(self):
            super().__init__()
            self.attention = LinearMultiHeadAttention(2, 4, 3)

        def call(self, x):
            return self.attention(x, x)

    model, x = Lazy(), normal(2, 9, 8)
    model.compile("adam", "mse")
    assert np.isfinite(model.fit(x, x, verbose=0).history["loss"]).all()


def test_lengths_and_masks_combine():
    layer, x = built(24), normal(3, 19, 12)
    mask = np.arange(19) < [[19], [4], [9]]
    expected = layer(x, x, lengths=np.array([7, 4, 9]))
    for call in (
        {"value_mask": mask},
        {"attention_mask": mask[:, None]},
        {"key_mask": mask, "attention_mask": mask[:, None]},
    ):
        assert_close(layer(x, x, lengths=np.array([7, 9, 19]), **call), expected)
    for wrong in (20, -1):
        with pytest.raises(ValueError, match="lengths contains numbers outside 0 … 19"):
            layer(x, x, lengths=np.array([7, 4, wrong]))


def test_a_functional_model_does_not_save_a_shared_projection(tmp_path):
    shared = make_projection(embed_dim=8, max_length=9, projected_length=3, sharing="layerwise")
    inputs = keras.Input((9, 8))
    first = LinearMultiHeadAttention(2, 4, 3, sharing="layerwise")(inputs, inputs, shared_projection=shared)
    model = keras.Model(
        inputs, LinearMultiHeadAttention(2, 4, 3, sharing="layerwise")(first, first, shared_projection=shared)
    )
    assert tuple(model(normal(2, 9, 8)).shape) == (2, 9, 8)
    with pytest.raises(NotImplementedError, match="write the model as a subclass"):
        model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="has projected_length=3 but this layer has 4"):
        LinearMultiHeadAttention(2, 4, 4, sharing="layerwise")(
            normal(2, 9, 8), normal(2, 9, 8), shared_projection=shared
        )
    with pytest.raises(ValueError, match="value has 10 tokens but the maximum is 9"):
        LinearMultiHeadAttention(2, 4, 3, sharing="layerwise")(
            normal(2, 10, 8), normal(2, 10, 8), shared_projection=shared
        )


@only_torch
@pytest.mark.parametrize(
    ("projection", "changes", "message"),
    [
        ("head_conv", {"head_dim": None}, "has head_dim=8 but this layer has 4"),
        ("conv", {"embed_dim": 6}, "has embed_dim=6 but this layer has 8"),
        ("conv", {"max_length": 6}, "has max_length=6 but this layer has 9"),
    ],
)
def test_a_shared_projection_has_the_sizes_of_the_layer(projection, changes, message):
    sizes = {"embed_dim": 8, "head_dim": 4, "max_length": 9, "projected_length": 3, "sharing": "layerwise"}
    layer = LinearMultiHeadAttention(2, 4, 3, sharing="layerwise", projection=projection, max_length=9)
    x = normal(2, 9, 8)
    assert layer(x, x, shared_projection=make_projection(projection, **sizes)).shape == x.shape
    with pytest.raises(ValueError, match=message):
        layer(x, x, shared_projection=make_projection(projection, **{**sizes, **changes}))


@only_torch
@pytest.mark.parametrize("sharing", ["headwise", "layerwise"])
def test_head_conv_needs_heads_of_one_width(sharing):
    layer = LinearMultiHeadAttention(2, 4, 3, value_dim=5, sharing=sharing, projection="head_conv", max_length=9)
    with pytest.raises(
        ValueError, match="key_dim is 4 and value_dim 5, but projection='head_conv' needs heads of equal"
    ):
        layer(normal(2, 9, 8), normal(2, 9, 8))


@only_torch
@pytest.mark.parametrize("sharing", ["headwise", "none"])
def test_int8_is_close_and_activities_are_regularized(sharing):
    x = normal(2, 9, 8)
    options = {"num_heads": 2, "key_dim": 4, "activity_regularizer": "l2"}
    model = model_of(LinearMultiHeadAttention(**options, projection_dim=3, sharing=sharing), (9, 8))
    exact = numpy(model(x))
    full = model_of(keras.layers.MultiHeadAttention(**options), (9, 8))
    full(x)
    assert len(model.losses) == len(full.losses)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns about the input layer of every model it quantizes
        model.quantize("int8")
    np.testing.assert_allclose(numpy(model(x)), exact, atol=0.1 * np.abs(exact).max())


def test_gradients_reach_every_weight_of_every_projection_and_sharing():
    """All layers are part of one model: one graph to compile."""
    inputs = keras.Input((9, 12))
    layers = [
        LinearMultiHeadAttention(3, 4, 5, projection=projection, sharing=sharing)
        for projection, sharing in COMBINATIONS
    ]
    model = keras.Model(inputs, keras.layers.Add()([layer(inputs, inputs) for layer in layers]))
    randomize(model)
    model.compile(keras.optimizers.SGD(1.0), "mse")
    before = [numpy(weight) for weight in model.weights]
    model.train_on_batch(normal(2, 9, 12), normal(2, 9, 12))
    for weight, old in zip(model.weights, before, strict=True):
        # a random E is fixed; the softmax is invariant to a constant added to all keys, up to rounding
        change, is_learned = np.abs(numpy(weight) - old).max(), weight.trainable and "key/bias" not in weight.path
        assert (change > 1e-5) == is_learned, (weight.path, change)


def test_full_attention_combines_lengths_with_any_mask():
    layer, x = built(6, projection_dim=None), normal(2, 6, 12)
    expected = layer(x, x, value_mask=np.arange(6) < [[6], [2]])
    for mask in (
        None,
        np.ones((6, 6), bool),
        np.ones((2, 6, 6), bool),
        np.ones((2, 3, 6, 6), bool),
        np.ones((2, 1, 6, 6), bool),
    ):
        assert_close(layer(x, x, lengths=[6, 2], attention_mask=mask), expected)
    with pytest.raises(ValueError, match="lengths contains numbers outside 0 … 6"):
        layer(x, x, lengths=[99, 2])


def test_the_gate_equals_that_of_multi_head_attention():
    """With one row per token and the identity as E, the layer equals its parent."""
    x = normal(2, 9, 8)
    full = built_on(keras.layers.MultiHeadAttention(2, 4, use_gate=True), x)
    ours = LinearMultiHeadAttention(2, 4, 9, sharing="kv", use_gate=True)
    ours(x, x)
    ours.set_weights([*full.get_weights(), np.eye(9)[:, None]])
    assert_close(ours(x, x), full(x, x))


def test_a_learned_E_starts_as_segment_means_plus_a_tenth_of_noise():
    layer = LinearMultiHeadAttention(3, 4, 4)
    layer.build((None, 32, 12), (None, 32, 12))
    E_NMK = numpy(layer.projection.weight)
    means = np.repeat(np.eye(4), 8, axis=0) / 8
    noise = E_NMK - means[:, None]
    assert noise.std() == pytest.approx(0.1 * 4**0.5 / 32, rel=0.2)
    assert np.abs(E_NMK[:, 0] - E_NMK[:, 1]).max() > 1e-3
