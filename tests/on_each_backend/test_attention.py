"""The layer: against the float64 reference, against MultiHeadAttention, and as any layer of Keras."""

import warnings

import keras
import numpy as np
import pytest
from battery import (
    COMBINATIONS,
    PROJECTIONS,
    assert_close,
    model_of,
    normal,
    numpy,
    randomise,
    reference_output,
    run_layer_test,
)

from linformer_kit.keras import LinearMultiHeadAttention
from linformer_kit.keras.projection import make_projection


def built(length, width=12, **options):
    layer = LinearMultiHeadAttention(**{"num_heads": 3, "key_dim": 4, "projection_dim": 5, **options})
    layer.build((None, length, width), (None, length, width))
    return randomise(layer)


@pytest.mark.parametrize(("projection", "sharing"), COMBINATIONS)
def test_it_is_the_reference_with_padding_anywhere(projection, sharing):
    layer, x = built(24, projection=projection, sharing=sharing), normal(3, 19, 12)
    mask = np.random.default_rng(1).random((3, 19)) > 0.4
    mask[0], mask[2] = True, np.arange(19) == 3
    assert_close(layer(x, x), reference_output(layer, x))
    assert_close(layer(x, x, value_mask=mask), reference_output(layer, x, mask))


@pytest.mark.parametrize(("projection", "sharing"), [("linear", "headwise"), ("random", "kv"), ("conv", "none")])
def test_rescaled_it_is_the_reference(projection, sharing):
    layer, x = built(24, projection=projection, sharing=sharing, rescale=True), normal(2, 19, 12)
    mask = np.arange(19) < [[19], [7]]
    assert_close(layer(x, x), reference_output(layer, x))
    assert_close(layer(x, x, value_mask=mask), reference_output(layer, x, mask))


def test_a_projection_of_all_layers_is_handed_in():
    layer, x = built(24, sharing="layerwise"), normal(2, 19, 12)
    sizes = {
        "embed_dim": 12,
        "max_length": 24,
        "projected_length": 5,
        "sharing": "layerwise",
        "num_heads": 3,
        "rescale": False,
    }
    shared = make_projection("linear", **sizes)
    shared.build()
    assert_close(layer(x, x, shared_projection=shared), reference_output(layer, x, shared=shared))
    with pytest.raises(ValueError, match="shared_projection is missing but sharing='layerwise'"):
        layer(x, x)
    with pytest.raises(ValueError, match="shared_projection is given but sharing='headwise'"):
        built(24)(x, x, shared_projection=shared)


@pytest.mark.parametrize("projection", ["linear", "dynamic", "conv"])
def test_gradients_are_those_of_the_reference(projection):
    """A step of gradient descent, against differences of the reference's loss in float64, in one direction per weight."""
    layer, x, rate = built(8, projection=projection), normal(2, 8, 12), 1e-3
    y = normal(2, 8, 12)
    model = model_of(layer, (8, 12))
    model.compile(keras.optimizers.SGD(rate), "mse")
    before = [numpy(weight).astype("float64") for weight in layer.weights]
    model.train_on_batch(x, y)
    gradients = [(old - numpy(weight)) / rate for old, weight in zip(before, layer.weights, strict=True)]
    for number, gradient in enumerate(gradients):
        direction = np.sign(gradient)  # the steepest, so that float32 can see it
        losses = []
        for step in (1e-2, -1e-2):
            for weight, old in zip(layer.weights, before, strict=True):
                weight.assign(old)
            layer.weights[number].assign(before[number] + step * direction)
            losses.append(((reference_output(layer, x) - y) ** 2).mean())
        assert (losses[0] - losses[1]) / 2e-2 == pytest.approx((gradient * direction).sum(), rel=0.03, abs=2e-3)


@pytest.mark.parametrize(
    "options", [{}, {"projection": "dynamic"}, {"projection": "conv", "sharing": "none"}, {"dropout": 0.1}]
)
def test_it_does_what_a_layer_of_keras_does(options, tmp_path):
    run_layer_test({"num_heads": 2, "key_dim": 8, "projection_dim": 6, **options}, normal(4, 20, 16), tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"value_dim": 6, "output_shape": 10, "use_bias": False},
        {
            "kernel_initializer": "he_normal",
            "bias_initializer": "ones",
            "kernel_regularizer": "l2",
            "bias_regularizer": "l1",
            "kernel_constraint": "max_norm",
            "use_gate": True,
            "seed": 7,
        },
    ],
)
def test_it_takes_what_multi_head_attention_takes(options, tmp_path):
    run_layer_test(
        {"num_heads": 2, "key_dim": 8, "projection_dim": 6, "projection": "mean", **options},
        normal(4, 20, 16),
        tmp_path,
    )


def test_the_losses_of_regularizers_are_those_of_multi_head_attention():
    x = normal(2, 9, 8)
    options = {
        "num_heads": 2,
        "key_dim": 4,
        "kernel_regularizer": "l2",
        "bias_regularizer": "l1",
        "bias_initializer": "ones",
    }
    full = keras.layers.MultiHeadAttention(**options)
    full(x, x)
    for sharing in ("headwise", "none"):
        ours = LinearMultiHeadAttention(**options, projection_dim=3, sharing=sharing)
        ours(x, x)
        for name in ("query_dense", "key_dense", "value_dense", "output_dense"):
            getattr(ours, name).set_weights(getattr(full, name).get_weights())
        ours(x, x)
        assert float(sum(map(numpy, ours.losses))) == pytest.approx(float(sum(map(numpy, full.losses))), rel=1e-5)


def test_without_a_projection_it_is_multi_head_attention():
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


def test_the_configuration_of_the_starting_document_has_its_parameters():
    for sharing, parameters in (("kv", 1_179_904), ("headwise", 1_307_904)):
        layer = LinearMultiHeadAttention(num_heads=8, key_dim=128, projection_dim=64, sharing=sharing)
        layer.build((None, 2000, 256), (None, 2000, 256))
        assert layer.count_params() == parameters


def test_scores_are_those_of_the_rows():
    layer, x = built(16), normal(2, 16, 12)
    output, scores = layer(x, x, return_attention_scores=True)
    assert_close(output, layer(x, x))
    assert tuple(scores.shape) == (2, 3, 16, 5)
    assert_close(numpy(scores).sum(axis=-1), np.ones((2, 3, 16)))
    inputs = keras.Input((16, 12))
    assert [tuple(spec.shape) for spec in layer(inputs, inputs, return_attention_scores=True)] == [
        (None, 16, 12),
        (None, 3, 16, 5),
    ]


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_shorter_inputs_and_what_stands_behind_the_mask(projection):
    layer, x = built(24, projection=projection), normal(2, 20, 12)
    mask = np.arange(20) < [[20], [11]]
    dirty = x.copy()
    dirty[~mask] = np.nan
    alone = layer(x[1:, :11], x[1:, :11])
    for call in (
        {"value_mask": mask},
        {"key_mask": mask},
        {"attention_mask": mask[:, None]},
        {"lengths": np.array([20, 11])},
    ):
        assert_close(layer(x, dirty, **call)[1:, :11], alone)
    every_query = np.repeat(mask[:, None], 20, axis=1)
    assert_close(layer(x, dirty, attention_mask=every_query)[1:, :11], alone)
    of_real_queries = every_query & mask[:, :, None]  # as Keras combines the masks of queries and keys
    assert_close(layer(x, dirty, attention_mask=of_real_queries)[1:, :11], alone)
    assert_close(layer(x, dirty, attention_mask=every_query[:, None])[1:, :11], alone)
    nothing = layer(x, dirty, value_mask=np.zeros((2, 20), bool))
    assert_close(nothing, np.broadcast_to(numpy(layer.output_dense.bias), (2, 20, 12)))


def test_other_masks_are_refused_and_in_a_graph_are_not_a_number():
    layer, x = built(6), normal(2, 6, 12)
    causal = np.tril(np.ones((2, 6, 6), bool))
    for mask in (causal, causal[0], causal[:, None]):
        with pytest.raises(ValueError, match="lets some queries see other keys than others do"):
            layer(x, x, attention_mask=mask)
    inputs, masks = keras.Input((6, 12)), keras.Input((6, 6), dtype="bool")
    model = keras.Model([inputs, masks], layer(inputs, inputs, attention_mask=masks))
    causal[1] = True  # the second example is right
    if keras.backend.backend() == "torch":  # which has no graph
        with pytest.raises(ValueError, match="lets some queries see"):
            model.predict([x, causal], verbose=0)
        return
    output = model.predict([x, causal], verbose=0)
    assert np.isnan(output[0]).all()
    assert_close(output[1], layer(x, x)[1])


@pytest.mark.parametrize("options", [{"use_causal_mask": True}])
def test_the_future_cannot_be_hidden(options):
    layer, x = built(6), normal(1, 6, 12)
    with pytest.raises(ValueError, match="no mask over them can hide it again"):
        layer(x, x, **options)
    with pytest.raises(ValueError, match="no mask over them can hide it again"):
        layer(keras.Input((6, 12)), keras.Input((6, 12)), **options)


@pytest.mark.parametrize("projection", ["linear", "mean"])
def test_the_mask_of_an_embedding_is_honoured_and_handed_on(projection):
    ids = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 0, 0, 0, 0, 0], [0, 2, 0, 7, 0, 0, 1, 0]])
    inputs = keras.Input((None,), dtype="int32")
    embedded = keras.layers.Embedding(10, 12, mask_zero=True)(inputs)
    attended = LinearMultiHeadAttention(3, 4, 5, max_length=8, projection=projection)(embedded, embedded)
    again = LinearMultiHeadAttention(3, 4, 5, max_length=8, projection=projection)(attended, attended)
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(again))
    together = model.predict(ids, verbose=0)
    assert_close(together[1:2], model.predict(ids[1:2, :3], verbose=0))
    assert_close(together[2], together[1])


def test_key_and_value_may_differ_also_in_width():
    x, key, value = normal(2, 7, 12), normal(2, 9, 10), normal(2, 9, 6)
    layer = LinearMultiHeadAttention(3, 4, 5, value_dim=2)
    output = layer(x, value, key)
    assert tuple(output.shape) == (2, 7, 12)
    # rows of keys from keys by E, rows of values from values by F
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


def test_attention_over_some_axes_of_many():
    x = normal(2, 3, 5, 12)
    options = {"num_heads": 3, "key_dim": 4, "projection_dim": 2}
    rows = randomise_after(LinearMultiHeadAttention(**options, attention_axes=2), x)
    output, scores = rows(x, x, return_attention_scores=True)
    flat = LinearMultiHeadAttention(**options)
    flat.build((None, 5, 12), (None, 5, 12))
    flat.set_weights(rows.get_weights())
    for number in range(3):
        one, its_scores = flat(x[:, number], x[:, number], return_attention_scores=True)
        assert_close(output[:, number], one)
        assert_close(scores[:, number], its_scores)
    mask = np.random.default_rng(2).random((2, 3, 5)) > 0.3
    assert_close(rows(x, x, value_mask=mask)[:, 1], flat(x[:, 1], x[:, 1], value_mask=mask[:, 1]))

    everything = randomise_after(LinearMultiHeadAttention(**options), x)
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


def randomise_after(layer, x):
    layer(x, x)
    return randomise(layer)


def test_dropout_in_training_only_and_from_its_seed():
    x = normal(2, 16, 12)

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


# a graph that is not compiled knows no lengths at all; only TensorFlow has such
@pytest.mark.parametrize("jit_compile", [False, "auto"] if keras.backend.backend() == "tensorflow" else ["auto"])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_lengths_that_a_graph_does_not_know(projection, jit_compile):
    layer = LinearMultiHeadAttention(3, 4, 5, max_length=40, projection=projection)
    model = model_of(layer, (None, 12))
    model.compile("sgd", "mse", jit_compile=jit_compile)
    for length in (3, 40):
        x = normal(2, length, 12)
        assert_close(model.predict(x, verbose=0), layer(x, x))
        assert np.isfinite(model.train_on_batch(x, x))


def test_it_may_be_built_while_a_graph_is_made():
    class Lazy(keras.Model):
        def __init__(self):
            super().__init__()
            self.attention = LinearMultiHeadAttention(2, 4, 3)

        def call(self, x):
            return self.attention(x, x)

    model, x = Lazy(), normal(2, 9, 8)
    model.compile("adam", "mse")
    assert np.isfinite(model.fit(x, x, verbose=0).history["loss"]).all()


def test_lengths_and_masks_are_both_honoured():
    layer, x = built(12), normal(2, 12, 12)
    mask = np.arange(12) < [[12], [4]]
    expected = layer(x, x, lengths=np.array([7, 4]))
    for call in (
        {"value_mask": mask},
        {"attention_mask": mask[:, None]},
        {"key_mask": mask, "attention_mask": mask[:, None]},
    ):
        assert_close(layer(x, x, lengths=np.array([7, 9]), **call), expected)
    for wrong in (13, -1):
        with pytest.raises(ValueError, match="lengths holds numbers that are not from 0 to 12"):
            layer(x, x, lengths=np.array([7, wrong]))


def test_a_shared_projection_in_a_functional_model_is_not_saved_as_several(tmp_path):
    shared = make_projection(embed_dim=8, max_length=9, projected_length=3)
    inputs = keras.Input((9, 8))
    first = LinearMultiHeadAttention(2, 4, 3, sharing="layerwise")(inputs, inputs, shared_projection=shared)
    model = keras.Model(
        inputs, LinearMultiHeadAttention(2, 4, 3, sharing="layerwise")(first, first, shared_projection=shared)
    )
    assert model.predict(normal(2, 9, 8), verbose=0).shape == (2, 9, 8)
    with pytest.raises(NotImplementedError, match="write the model as a subclass"):
        model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="was made with projected_length=3 but this layer needs 4"):
        LinearMultiHeadAttention(2, 4, 4, sharing="layerwise")(
            normal(2, 9, 8), normal(2, 9, 8), shared_projection=shared
        )
    with pytest.raises(ValueError, match="value has 10 tokens but this was built for 9"):
        LinearMultiHeadAttention(2, 4, 3, sharing="layerwise")(
            normal(2, 10, 8), normal(2, 10, 8), shared_projection=shared
        )


@pytest.mark.parametrize("sharing", ["headwise", "none"])
def test_quantised_it_is_nearly_itself_and_activities_are_regularised(sharing):
    x = normal(2, 9, 8)
    options = {"num_heads": 2, "key_dim": 4, "activity_regularizer": "l2"}
    model = model_of(LinearMultiHeadAttention(**options, projection_dim=3, sharing=sharing), (9, 8))
    exact = model.predict(x, verbose=0)
    full = model_of(keras.layers.MultiHeadAttention(**options), (9, 8))
    for each in (model, full):
        each(x)
    assert len(model.losses) == len(full.losses)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of the inputs of every model it quantises
        model.quantize("int8")
    np.testing.assert_allclose(model.predict(x, verbose=0), exact, atol=0.1 * np.abs(exact).max())


def test_gradients_reach_every_weight_of_every_projection_and_sharing():
    """All layers side by side in one model: one graph to compile."""
    inputs = keras.Input((9, 12))
    layers = [
        LinearMultiHeadAttention(3, 4, 5, projection=projection, sharing=sharing)
        for projection, sharing in COMBINATIONS
    ]
    model = keras.Model(inputs, keras.layers.Add()([layer(inputs, inputs) for layer in layers]))
    randomise(model)
    model.compile(keras.optimizers.SGD(1.0), "mse")
    before = [numpy(weight) for weight in model.weights]
    model.train_on_batch(normal(2, 9, 12), normal(2, 9, 12))
    for weight, old in zip(model.weights, before, strict=True):
        # a random E is not learnt; the softmax does not see what all keys have in common, in float32 nearly
        change, is_learnt = np.abs(numpy(weight) - old).max(), weight.trainable and "key/bias" not in weight.path
        assert (change > 1e-5) == is_learnt, (weight.path, change)


def test_full_attention_honours_lengths_beside_any_mask():
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
    with pytest.raises(ValueError, match="lengths holds numbers that are not from 0 to 6"):
        layer(x, x, lengths=[99, 2])


def test_the_gate_is_that_of_multi_head_attention():
    """With as many rows as tokens, and E the identity, ours is the parent's computation."""
    x = normal(2, 9, 8)
    full = randomise_after(keras.layers.MultiHeadAttention(2, 4, use_gate=True), x)
    ours = LinearMultiHeadAttention(2, 4, 9, sharing="kv", use_gate=True)
    ours(x, x)
    ours.set_weights([*full.get_weights(), np.eye(9)[:, None]])
    assert_close(ours(x, x), full(x, x))


def test_a_learned_E_starts_as_segment_means_and_a_tenth_of_noise():
    E_NMK = numpy(built_fresh(32).projection.weight)
    means = np.repeat(np.eye(4), 8, axis=0) / 8
    noise = E_NMK - means[:, None]
    assert noise.std() == pytest.approx(0.1 * 4**0.5 / 32, rel=0.2)
    assert np.abs(E_NMK[:, 0] - E_NMK[:, 1]).max() > 1e-3


def built_fresh(length):
    layer = LinearMultiHeadAttention(3, 4, 4)
    layer.build((None, length, 12), (None, length, 12))
    return layer
