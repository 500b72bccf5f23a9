"""The models: they fit, save, load and summarise as Keras's do; padding never matters; they learn."""

import keras
import numpy as np
import pytest
from battery import assert_all_is_learnt, assert_close, numpy, randomise

from linformer_kit.keras import Linformer, LinformerBackbone, LinformerCausalLM, LinformerMaskedLM, LinformerSeq2Seq

SIZES = {"k": 6, "max_len": 32, "vocab_size": 30, "d_model": 16, "d_ff": 24, "n_heads": 2, "n_layers": 2}
RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 30, (8, 20))
CLASSES = np.arange(8) % 3


def padded(ids, length, where):
    """The same tokens with zeros on the left, on the right or in between."""
    places = {"left": np.arange(length - len(ids), length), "right": np.arange(len(ids))}
    places["between"] = np.sort(np.random.default_rng(5).permutation(length)[: len(ids)])
    result = np.zeros(length, ids.dtype)
    result[places[where]] = ids
    return result


def test_it_is_compiled_fitted_evaluated_asked_and_saved(tmp_path):
    """Line by line what people of Keras do; the last arguments are those of an older Linformer."""
    model = Linformer(
        k=6,
        max_len=32,
        vocab_size=30,
        d_model=16,
        d_ff=24,
        n_heads=4,
        n_layers=3,
        dropout=0.1,
        full_attn=False,
        n_classes=3,
        batch_size=16,
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    best = tmp_path / "best.keras"
    callbacks = [
        keras.callbacks.EarlyStopping(patience=5),
        keras.callbacks.ModelCheckpoint(best),
        keras.callbacks.TensorBoard(tmp_path / "log"),
    ]
    history = model.fit(
        IDS, CLASSES, batch_size=4, epochs=2, validation_data=(IDS, CLASSES), callbacks=callbacks, verbose=0
    )
    assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert any((tmp_path / "log").rglob("*tfevents*"))
    loss, accuracy = model.evaluate(IDS, CLASSES, verbose=0)
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
        assert_close(loaded.predict(IDS, verbose=0), probabilities)
    loaded.fit(IDS, CLASSES, verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    fresh = Linformer.from_config(model.get_config())
    fresh.load_weights(tmp_path / "model.weights.h5")
    assert_close(fresh.predict(IDS, verbose=0), probabilities)


def test_it_runs_eagerly_too():
    model = Linformer(**SIZES, n_classes=3)
    model.compile("adam", "sparse_categorical_crossentropy", run_eagerly=True)
    assert np.isfinite(model.fit(IDS[:2], CLASSES[:2], verbose=0).history["loss"]).all()


@pytest.mark.parametrize(
    "options", [{}, {"projection": "mean", "positions": "sinusoidal"}, {"full_attn": True, "pooling": "first"}]
)
def test_padding_never_matters(options):
    model = randomise(Linformer(**SIZES, n_classes=3, **options))
    alone = model.predict(IDS[:1], verbose=0)
    for where in ("left", "right", "between"):
        batch = np.stack([padded(IDS[0], 31, where), padded(IDS[1][:4], 31, where)])
        assert_close(model.predict(batch, verbose=0)[:1], alone)
    given = {"input_ids": np.where(batch == 0, 7, batch), "attention_mask": (batch != 0).astype("int32")}
    assert_close(model.predict(given, verbose=0)[:1], alone)
    assert np.isfinite(model.predict(np.zeros((2, 9), int), verbose=0)).all()


@pytest.mark.parametrize("kind", [LinformerBackbone, LinformerMaskedLM, LinformerCausalLM])
def test_states_stand_where_their_tokens_stood(kind):
    model = randomise(kind(**SIZES, block_length=8, slots=2))
    alone = numpy(model(IDS[:1]))[0]
    for where in ("left", "right", "between"):
        ids = padded(IDS[0], 31, where)
        assert_close(numpy(model(ids[None]))[0][ids != 0], alone)


def test_nothing_of_the_future_reaches_a_causal_model():
    model = randomise(LinformerCausalLM(**SIZES, block_length=4, slots=2))
    before = numpy(model(IDS[:1]))
    for place in range(20):
        changed = IDS[:1].copy()
        changed[0, place] = changed[0, place] % 29 + 1
        after = numpy(model(changed))
        np.testing.assert_allclose(after[:, :place], before[:, :place], atol=1e-5)
        assert np.abs(after[:, place:] - before[:, place:]).max() > 1e-3
        assert (np.abs(after - before).max(axis=-1)[0, place:] > 0).mean() > 0.5  # and the past does reach it


def test_kinds_of_tokens_tell_pairs_apart():
    model = randomise(Linformer(**SIZES, n_classes=3, token_types=2))
    types = np.array([[0] * 10 + [1] * 10] * 8)
    with_types = model.predict({"input_ids": IDS, "token_type_ids": types}, verbose=0)
    assert np.abs(with_types - model.predict(IDS, verbose=0)).max() > 1e-3
    assert_close(
        model.predict({"input_ids": IDS, "token_type_ids": 0 * types}, verbose=0), model.predict(IDS, verbose=0)
    )
    batch = {"input_ids": np.stack([padded(ids, 31, "between") for ids in IDS])}
    batch["token_type_ids"] = np.zeros_like(batch["input_ids"])
    batch["token_type_ids"][batch["input_ids"] != 0] = types.ravel()
    assert_close(model.predict(batch, verbose=0), with_types)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    exact = Linformer(**SIZES, n_classes=3)
    half = Linformer(**SIZES, n_classes=3, dtype=policy)
    half.set_weights(exact.get_weights())
    assert half.stack.blocks[0].attention.compute_dtype == policy.removeprefix("mixed_")
    assert keras.config.dtype_policy().name == "float32"
    probabilities = half.predict(IDS, verbose=0)
    assert probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities, exact.predict(IDS, verbose=0), atol=0.05)
    half.compile("adam", "sparse_categorical_crossentropy")
    assert np.isfinite(half.fit(IDS, CLASSES, verbose=0).history["loss"]).all()


@pytest.mark.parametrize(
    "options", [{"sharing": "layerwise", "projection": "dynamic"}, {"tied": False, "norm_first": False, "k": [4, 6]}]
)
def test_all_models_learn_with_every_weight_and_are_saved(options, tmp_path):
    sizes = {**SIZES, **options, "block_length": 8, "slots": 2}
    target = np.roll(IDS, 1, axis=1)
    fed = {
        LinformerMaskedLM(**sizes): (IDS, IDS),
        LinformerCausalLM(**sizes): (IDS, IDS),
        LinformerSeq2Seq(**sizes): ({"input_ids": IDS, "decoder_input_ids": target}, IDS),
    }
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    for model, (x, y) in fed.items():
        randomise(model)
        model.compile(keras.optimizers.SGD(1.0), loss)
        assert_all_is_learnt(model, x, y)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert_close(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_models_can_be_parts_of_others():
    inputs = keras.Input((None,), dtype="int32")
    states = LinformerBackbone(**SIZES)(inputs)
    assert tuple(states.shape) == (None, None, 16)
    model = keras.Model(inputs, keras.layers.Dense(5)(states))
    assert model.predict(IDS, verbose=0).shape == (8, 20, 5)
    assert tuple(Linformer(**SIZES, n_classes=3)(inputs).shape) == (None, 3)
    both = {"input_ids": inputs, "decoder_input_ids": keras.Input((7,), dtype="int32")}
    assert tuple(LinformerSeq2Seq(**SIZES)(both).shape) == (None, 7, 30)


def test_the_same_seed_trains_the_same_model():
    def trained():
        keras.utils.set_random_seed(4)
        model = Linformer(**SIZES, n_classes=3)
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(IDS, CLASSES, verbose=0)
        return model.predict(IDS, verbose=0)

    np.testing.assert_array_equal(trained(), trained())


def test_it_learns_which_token_is_there():
    ids = RNG.integers(4, 30, (256, 24))
    classes = np.arange(256) % 3
    ids[np.arange(256), RNG.integers(0, 24, 256)] = 1 + classes
    model = Linformer(**{**SIZES, "dropout": 0.0, "n_layers": 1, "projection": "dynamic"}, n_classes=3)
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(ids[:192], classes[:192], epochs=25, batch_size=32, verbose=0)
    assert model.evaluate(ids[192:], classes[192:], verbose=0)[1] > 0.95


def test_layers_behind_a_model_leave_padding_out():
    ids = np.stack([padded(ids[:5], 20, "between") for ids in IDS])
    inputs = keras.Input((None,), dtype="int32")
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(randomise(LinformerBackbone(**SIZES))(inputs)))
    assert_close(model.predict(ids, verbose=0), model.predict(IDS[:, :5], verbose=0))


def test_padding_is_not_learnt_from_where_the_loss_ignores_it():
    ids = np.stack([padded(ids[:5], 20, "between") for ids in IDS])
    model = randomise(LinformerMaskedLM(**{**SIZES, "dropout": 0.0}))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0))
    assert model.evaluate(ids, ids, verbose=0) == pytest.approx(
        model.evaluate(IDS[:, :5], IDS[:, :5], verbose=0), rel=1e-4
    )


def test_ids_may_come_as_floats_also_in_half_precision():
    model = randomise(Linformer(**{**SIZES, "vocab_size": 1000}, dtype="mixed_bfloat16"))
    ids = np.random.default_rng(3).integers(500, 1000, (2, 20))
    np.testing.assert_array_equal(model.predict(ids.astype("float32"), verbose=0), model.predict(ids, verbose=0))


def test_what_is_refused_leaves_the_model_as_it_was():
    model = Linformer(**SIZES, n_classes=3)
    model.compile("sgd", "sparse_categorical_crossentropy")
    before = model.predict(IDS, verbose=0)
    too_long = np.ones((2, 40), int)
    for method in ("predict", "predict_on_batch"):
        with pytest.raises(ValueError, match="the input has 40 tokens but this was built for 32"):
            getattr(model, method)(too_long)
    for method in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
        with pytest.raises(ValueError, match="the input has 40 tokens but this was built for 32"):
            getattr(model, method)(too_long, np.zeros(2))
    with pytest.raises(ValueError, match="the input has 40 tokens but this was built for 32"):
        model.fit(IDS, CLASSES, validation_data=(too_long, np.zeros(2)), verbose=0)
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), before)


class TooLong(keras.utils.PyDataset):
    """What only the graph will see: a batch of more tokens than the model was built for."""

    def __len__(self):
        return 1

    def __getitem__(self, number):
        return (np.ones((2, 40), "int32"),)


def test_what_is_refused_inside_leaves_the_model_as_it_was():
    model = Linformer(**SIZES, n_classes=3)
    before = model.predict(IDS, verbose=0)
    with pytest.raises(ValueError, match="the input has 40 tokens but this was built for 32"):
        model.predict(TooLong(), verbose=0)
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), before)
    assert_close(model(IDS), before)


def test_an_empty_source_is_nothing_to_attend_to():
    for options in ({"full_attn": True}, {}):
        model = randomise(LinformerSeq2Seq(**SIZES, **options))
        short, long = (model({"input_ids": np.zeros((1, n), int), "decoder_input_ids": IDS[:1]}) for n in (4, 9))
        assert_close(short, long)


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="SavedModel is TensorFlow's; JAX exports to it too")
def test_models_are_exported(tmp_path):
    import tensorflow as tf

    model = randomise(Linformer(**SIZES, n_classes=3))
    model.export(tmp_path / "classifier", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "classifier")
    lengths = (20, 7) if keras.backend.backend() == "tensorflow" else (32,)
    for length in lengths:
        ids = RNG.integers(0, 30, (3, length)).astype("int32")
        assert_close(loaded.serve(ids).numpy(), model.predict(ids, verbose=0))
