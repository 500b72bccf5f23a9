"""The models: fit, save and load as in Keras; padding never changes the output; they learn."""

import keras
import numpy as np
import pytest
from battery import IS_TORCH, assert_close, assert_every_weight_learns, cases, numpy, only_torch, randomize

from linformer_kit.keras import Linformer, LinformerBackbone, LinformerCausalLM, LinformerMaskedLM, LinformerSeq2Seq

# one layer, because each graph is compiled; tests of what layers share use two. Batches of 8 with 20 or 31 tokens
# wherever possible, because JAX compiles each operation for each shape
SIZES = {"k": 6, "max_len": 32, "vocab_size": 30, "d_model": 16, "d_ff": 24, "n_heads": 2, "n_layers": 1}
RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 30, (8, 20))
CLASSES = np.arange(8) % 3


PLACES = ("left", "right", "between")


def padded(ids, length, where):
    """The same tokens with zeros on the left, on the right or in between."""
    places = {"left": np.arange(length - len(ids), length), "right": np.arange(len(ids))}
    places["between"] = np.sort(np.random.default_rng(5).permutation(length)[: len(ids)])
    result = np.zeros(length, ids.dtype)
    result[places[where]] = ids
    return result


def test_compile_fit_evaluate_predict_and_save(tmp_path):
    """The usual workflow in Keras. The arguments are those of the original Keras implementation."""
    model = Linformer(
        k=6,
        max_len=32,
        vocab_size=30,
        d_model=16,
        d_ff=24,
        n_heads=2,
        n_layers=1,
        dropout=0.1,
        full_attn=False,
        n_classes=3,
        batch_size=16,
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "untrained.keras")
    model = keras.models.load_model(tmp_path / "untrained.keras")  # a loaded model is compiled and can be trained
    best = tmp_path / "best.keras"
    callbacks = [keras.callbacks.EarlyStopping(patience=5), keras.callbacks.ModelCheckpoint(best)]
    if keras.backend.backend() == "tensorflow":  # the callback imports TensorFlow, which takes seconds elsewhere
        callbacks.append(keras.callbacks.TensorBoard(tmp_path / "log"))
    history = model.fit(
        IDS, CLASSES, batch_size=4, epochs=2, validation_data=(IDS, CLASSES), callbacks=callbacks, verbose=0
    )
    assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert any((tmp_path / "log").rglob("*tfevents*")) == (keras.backend.backend() == "tensorflow")
    loss, accuracy = model.evaluate(IDS, CLASSES, batch_size=4, verbose=0)  # with the graph of the validation
    probabilities = model.predict(IDS, verbose=0)
    assert_close(probabilities.sum(axis=1), np.ones(8))
    assert accuracy == pytest.approx((probabilities.argmax(axis=1) == CLASSES).mean())
    assert loss == pytest.approx(-np.log(probabilities[np.arange(8), CLASSES]).mean(), rel=1e-4)
    printed = []
    model.summary(print_fn=lambda line, line_break=True: printed.append(line))
    assert f"{model.num_params():,}" in "\n".join(printed)
    assert model.num_params() == sum(
        int(np.prod(weight.shape)) for weight in model.weights if "seed" not in weight.path
    )

    model.save(tmp_path / "model.keras")
    for path in (tmp_path / "model.keras", best):
        loaded = keras.models.load_model(path)
        assert loaded.get_config() == model.get_config()
        assert_close(loaded(IDS), probabilities)
    if IS_TORCH:  # elsewhere the graph would be compiled again
        loaded.fit(IDS, CLASSES, verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    fresh = Linformer.from_config(model.get_config())
    fresh.load_weights(tmp_path / "model.weights.h5")
    assert_close(fresh(IDS), probabilities)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX compiles every operation of the gradient")
def test_it_trains_eagerly():
    model = Linformer(**SIZES, n_classes=3)
    model.compile("adam", "sparse_categorical_crossentropy", run_eagerly=True)
    assert np.isfinite(model.fit(IDS[:2], CLASSES[:2], verbose=0).history["loss"]).all()


@pytest.mark.parametrize(
    "options",
    cases(
        {},
        torch=[
            {"projection": "mean", "positions": "sinusoidal"},
            {"full_attn": True, "pooling": "first"},
            {"window_length": 3, "global_tokens": 1, "distance_bias": True},
        ],
    ),
)
def test_padding_never_changes_the_output(options):
    model = randomize(Linformer(**SIZES, n_classes=3, **options))
    alone = np.repeat(numpy(model(IDS))[:1], 3, axis=0)
    rows = [padded(IDS[0], 31, where) for where in PLACES]
    batch = np.stack([*rows, padded(IDS[1][:4], 31, "left"), *np.zeros((4, 31), int)])
    probabilities = numpy(model(batch))
    assert_close(probabilities[:3], alone)
    assert np.isfinite(probabilities).all()  # also without any token
    masked = {"input_ids": np.where(batch == 0, 7, batch), "attention_mask": (batch != 0).astype("int32")}
    assert_close(model(masked)[:4], probabilities[:4])


@pytest.mark.parametrize("kind", cases(LinformerMaskedLM, torch=[LinformerBackbone, LinformerCausalLM]))
def test_outputs_are_at_the_positions_of_their_tokens(kind):
    model = randomize(kind(**SIZES, block_length=8, slots=2))
    alone = numpy(model(IDS))
    batch = np.stack([padded(ids, 31, PLACES[number % 3]) for number, ids in enumerate(IDS)])
    for ids, output, expected in zip(batch, numpy(model(batch)), alone, strict=True):
        assert_close(output[ids != 0], expected)


def test_a_causal_model_never_sees_the_future():
    model = randomize(LinformerCausalLM(**{**SIZES, "n_layers": 2}, block_length=4, slots=2))
    ids = np.repeat(IDS[:1], 21, axis=0)  # the first as it is, the others with one token changed each
    place = np.arange(20)
    ids[1 + place, place] = ids[0] % 29 + 1
    before, *others = numpy(model(ids))
    for place, after in enumerate(others):
        np.testing.assert_allclose(after[:place], before[:place], atol=1e-5)
        assert np.abs(after[place:] - before[place:]).max() > 1e-3
        assert (np.abs(after - before).max(axis=-1)[place:] > 0).mean() > 0.5  # and it sees the past


@only_torch
def test_token_types_distinguish_pairs():
    model = randomize(Linformer(**SIZES, n_classes=3, token_types=2))
    types = np.array([[0] * 10 + [1] * 10] * 8)
    with_types, without = numpy(model({"input_ids": IDS, "token_type_ids": types})), numpy(model(IDS))
    assert np.abs(with_types - without).max() > 1e-3
    assert_close(model({"input_ids": IDS, "token_type_ids": 0 * types}), without)
    batch = {"input_ids": np.stack([padded(ids, 31, "between") for ids in IDS])}
    batch["token_type_ids"] = np.zeros_like(batch["input_ids"])
    batch["token_type_ids"][batch["input_ids"] != 0] = types.ravel()
    assert_close(model(batch), with_types)


@pytest.mark.parametrize("policy", cases("mixed_float16", torch=["mixed_bfloat16"]))
def test_mixed_precision(policy):
    exact = Linformer(**SIZES, n_classes=3)
    half = Linformer(**SIZES, n_classes=3, dtype=policy)
    half.set_weights(exact.get_weights())
    assert half.stack.blocks[0].attention.compute_dtype == policy.removeprefix("mixed_")
    assert keras.config.dtype_policy().name == "float32"
    probabilities = half.predict(IDS, verbose=0)
    assert probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities, numpy(exact(IDS)), atol=0.05)
    half.compile("adam", "sparse_categorical_crossentropy")
    assert np.isfinite(half.fit(IDS, CLASSES, verbose=0).history["loss"]).all()


LAYERWISE = {"sharing": "layerwise", "projection": "dynamic"}
UNTIED = {"tied": False, "norm_first": False, "k": [4, 6]}
WINDOW = {"window_length": 4, "global_tokens": 1}


@pytest.mark.parametrize(
    ("kind", "options"),
    cases(
        (LinformerSeq2Seq, LAYERWISE),
        (LinformerMaskedLM, UNTIED),
        (LinformerCausalLM, UNTIED),
        torch=[
            (LinformerSeq2Seq, UNTIED | WINDOW | {"distance_bias": True}),
            (LinformerMaskedLM, LAYERWISE | WINDOW),
            (LinformerMaskedLM, {**WINDOW, "k": 0}),
            (LinformerCausalLM, LAYERWISE),
        ],
    ),
)
def test_every_weight_learns_and_is_saved(kind, options, tmp_path):
    model = randomize(kind(**{**SIZES, **options, "n_layers": 2, "block_length": 8, "slots": 2}))
    is_seq2seq = kind is LinformerSeq2Seq
    x = {"input_ids": IDS, "decoder_input_ids": np.roll(IDS, 1, axis=1)} if is_seq2seq else IDS
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile(keras.optimizers.SGD(1.0), loss)
    assert_every_weight_learns(model, x, IDS)
    model.save(tmp_path / "model.keras")
    assert_close(keras.models.load_model(tmp_path / "model.keras")(x), model(x))


def test_models_can_be_parts_of_other_models():
    inputs = keras.Input((None,), dtype="int32")
    states = LinformerBackbone(**SIZES)(inputs)
    assert tuple(states.shape) == (None, None, 16)
    model = keras.Model(inputs, keras.layers.Dense(5)(states))
    assert tuple(model(IDS).shape) == (8, 20, 5)
    assert tuple(Linformer(**SIZES, n_classes=3)(inputs).shape) == (None, 3)
    both = {"input_ids": inputs, "decoder_input_ids": keras.Input((7,), dtype="int32")}
    assert tuple(LinformerSeq2Seq(**SIZES)(both).shape) == (None, 7, 30)


@only_torch
def test_the_same_seed_trains_the_same_model():
    def trained():
        keras.utils.set_random_seed(4)
        model = Linformer(**SIZES, n_classes=3)
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(IDS, CLASSES, verbose=0)
        return model.get_weights()

    for one, other in zip(trained(), trained(), strict=True):
        np.testing.assert_array_equal(one, other)


@only_torch
def test_it_learns_to_find_a_token():
    ids = RNG.integers(4, 30, (256, 24))
    classes = np.arange(256) % 3
    ids[np.arange(256), RNG.integers(0, 24, 256)] = 1 + classes
    model = Linformer(**{**SIZES, "dropout": 0.0, "projection": "dynamic"}, n_classes=3)
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    repeated = np.tile(np.arange(192), 25)  # 25 epochs in one, which saves the overhead of each
    model.fit(ids[repeated], classes[repeated], batch_size=32, verbose=0)
    assert model.evaluate(ids[192:], classes[192:], verbose=0)[1] > 0.95


@only_torch
def test_later_layers_ignore_padding():
    ids = np.stack([padded(ids[:5], 20, "between") for ids in IDS])
    inputs = keras.Input((None,), dtype="int32")
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(randomize(LinformerBackbone(**SIZES))(inputs)))
    assert_close(model(ids), model(IDS[:, :5]))


def test_a_loss_can_ignore_padding():
    ids = np.stack([padded(ids[:5], 20, "between") for ids in IDS])
    model = randomize(LinformerMaskedLM(**{**SIZES, "dropout": 0.0}))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0))
    assert model.evaluate(ids, ids, verbose=0) == pytest.approx(
        model.evaluate(IDS[:, :5], IDS[:, :5], verbose=0), rel=1e-4
    )


def test_ids_may_be_floats_in_half_precision():
    model = randomize(Linformer(**{**SIZES, "vocab_size": 1000}, dtype="mixed_bfloat16"))
    ids = np.random.default_rng(3).integers(500, 1000, (2, 20))
    np.testing.assert_array_equal(model.predict(ids.astype("float32"), verbose=0), model.predict(ids, verbose=0))


def test_invalid_inputs_leave_the_model_unchanged():
    model = Linformer(**SIZES, n_classes=3)
    model.compile("sgd", "sparse_categorical_crossentropy")
    before = model.predict(IDS, verbose=0)
    too_long = np.ones((2, 40), int)
    for method in ("predict", "predict_on_batch"):
        with pytest.raises(ValueError, match="the input has 40 tokens but the maximum is 32"):
            getattr(model, method)(too_long)
    for method in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
        with pytest.raises(ValueError, match="the input has 40 tokens but the maximum is 32"):
            getattr(model, method)(too_long, np.zeros(2))
    with pytest.raises(ValueError, match="the input has 40 tokens but the maximum is 32"):
        model.fit(IDS, CLASSES, validation_data=(too_long, np.zeros(2)), verbose=0)
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), before)


class TooLong(keras.utils.PyDataset):
    """A batch with too many tokens that is seen only inside `predict`."""

    def __len__(self):
        return 1

    def __getitem__(self, number):
        return (np.ones((2, 40), "int32"),)


def test_an_error_inside_predict_leaves_the_model_unchanged():
    model = Linformer(**SIZES, n_classes=3)
    before = model.predict(IDS, verbose=0)
    with pytest.raises(ValueError, match="the input has 40 tokens but the maximum is 32"):
        model.predict(TooLong(), verbose=0)
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), before)
    assert_close(model(IDS), before)


@only_torch
def test_the_length_of_an_empty_source_has_no_effect():
    for options in ({"full_attn": True}, {}):
        model = randomize(LinformerSeq2Seq(**SIZES, **options))
        short, long = (model({"input_ids": np.zeros((1, n), int), "decoder_input_ids": IDS[:1]}) for n in (20, 31))
        assert_close(short, long)


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="SavedModel needs TensorFlow or JAX")
def test_models_are_exported(tmp_path):
    import tensorflow as tf

    model = randomize(Linformer(**SIZES, n_classes=3))
    model.export(tmp_path / "classifier", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "classifier")
    lengths = (20, 7) if keras.backend.backend() == "tensorflow" else (32,)
    for length in lengths:
        ids = RNG.integers(0, 30, (3, length)).astype("int32")
        assert_close(loaded.serve(ids).numpy(), model.predict(ids, verbose=0))
