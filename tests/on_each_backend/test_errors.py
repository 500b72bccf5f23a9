"""Invalid input raises an error that names the problem, eagerly and, if shapes are known, while a graph is traced."""

import keras
import numpy as np
import pytest
from battery import IS_TORCH, normal

from linformer_kit.keras import LinearMultiHeadAttention, Linformer, LinformerCausalLM, LinformerSeq2Seq, Options
from linformer_kit.keras.causal import CausalLinearMultiHeadAttention

SIZES = {"k": 6, "max_len": 32, "vocab_size": 30, "d_model": 16, "d_ff": 24, "n_heads": 2, "n_layers": 1}
IDS = np.random.default_rng(0).integers(1, 30, (4, 20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection_dim": 0}, "projection_dim is 0, which only layers with a window can have; set projection_dim"),
        ({"projection_dim": -1}, "projection_dim is -1; it must be an integer of at least 1"),
        ({"projection_dim": -1, "window_length": 4}, "projection_dim is -1; with a window it must be an integer"),
        ({"window_length": -1}, "window_length is -1; it must be an integer of at least 0"),
        ({"window_length": True}, "window_length is True"),
        ({"window_length": 4, "global_tokens": 1.5}, "global_tokens is 1.5; it must be an integer of at least 0"),
        ({"global_tokens": 1}, "global_tokens=1 needs a window, but window_length is 0"),
        ({"projection_dim": None, "window_length": 4}, "window_length=4 with projection_dim=None, full attention"),
        ({"projection_dim": None, "distance_bias": True}, "distance_bias=True needs a window"),
        ({"window_length": 4, "distance_bias": 1}, "distance_bias is 1; it must be True or False"),
        ({"projection_dim": 2.5}, "projection_dim is 2.5; it must be an integer"),
        ({"sharing": "headwize"}, "sharing is 'headwize'; it must be one of .* did you mean 'headwise'"),
        ({"projection": "liner"}, "projection is 'liner'; it must be one of .* did you mean 'linear'"),
        ({"projection": "none"}, "for full attention use projection_dim=None"),
        ({"projection": "mean", "sharing": "none"}, "projection='mean' has no matrices"),
        ({"projection": "dynamic", "rescale": True}, "rescale=True compensates for rows of E"),
        ({"max_length": 0}, "max_length is 0"),
        ({"sliding_window": 3}, "no window can be cut out of them"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_heads": True}, "num_heads is True"),
        ({"key_dim": -1}, "key_dim is -1"),
        ({"dropout": None}, "dropout is None"),
        ({"projection_dim": None, "sharing": "all"}, "sharing is 'all'"),
    ],
)
def test_invalid_options_of_the_layer_raise(options, message):
    with pytest.raises(ValueError, match=message):
        LinearMultiHeadAttention(**{"num_heads": 2, "key_dim": 4, "projection_dim": 3, **options})


def test_an_unknown_option_raises():
    with pytest.raises((TypeError, ValueError), match="projected_dim"):
        LinearMultiHeadAttention(2, 4, projected_dim=3)


@pytest.mark.parametrize("symbolic", [False, True])
def test_invalid_shapes_of_the_layer_raise(symbolic):
    def given(*shape):
        return keras.KerasTensor((None, *shape)) if symbolic else normal(2, *shape)

    layer = LinearMultiHeadAttention(2, 4, 3)
    layer.build((None, 10, 8), (None, 10, 8))
    with pytest.raises(ValueError, match="value has 11 tokens but the maximum is 10; truncate it"):
        layer(given(11, 8), given(11, 8))
    with pytest.raises(ValueError, match=r"query has shape .*; it must be \(batch, length, width\)"):
        LinearMultiHeadAttention(2, 4, 3)(given(8), given(8))
    with pytest.raises(ValueError, match="value has shape"):
        layer(given(10, 8), given(4, 5, 8))
    with pytest.raises(ValueError, match="it must contain at least one token"):
        layer(given(10, 8), given(0, 8))
    with pytest.raises(ValueError, match="attention_axes is 3; for inputs of rank 4 use axes between batch and width"):
        LinearMultiHeadAttention(2, 4, 3, attention_axes=3)(given(5, 6, 8), given(5, 6, 8))
    with pytest.raises(ValueError, match="but there are 10 queries and 10 keys"):
        layer(given(10, 8), given(10, 8), attention_mask=given(10, 9))
    with pytest.raises(ValueError, match="its number of queries differs"):
        layer(given(10, 8), given(10, 8), attention_mask=given(9, 10))
    with pytest.raises(ValueError, match="there must be one value per key"):
        layer(given(10, 8), given(9, 8), given(10, 8))
    with pytest.raises(ValueError, match=r"lengths has shape .*; it must be \(batch,\)"):
        layer(given(10, 8), given(10, 8), lengths=given(10))
    with pytest.raises(ValueError, match="flatten them"):
        LinearMultiHeadAttention(2, 4, 3)(given(5, 6, 8), given(5, 6, 8), attention_mask=given(30, 30))


def test_an_unknown_length_raises():
    inputs = keras.Input((None, 8))
    with pytest.raises(
        ValueError, match=r"the length of the keys is unknown.* set max_length=.*'dynamic', 'mean' or 'max'"
    ):
        LinearMultiHeadAttention(2, 4, 3)(inputs, inputs)
    for options in ({"max_length": 9}, {"projection": "dynamic"}, {"projection": "mean"}):
        LinearMultiHeadAttention(2, 4, 3, **options)(inputs, inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k is 0, which only layers with a window can have; set k to at least 1, or set window_length"),
        ({"k": 2.5}, "k is 2.5; it must be an integer of at least 1"),
        ({"window_length": 0.5}, "window_length is 0.5; it must be an integer of at least 0"),
        ({"global_tokens": 1}, "global_tokens=1 needs a window"),
        ({"full_attn": True, "window_length": 4}, "window_length=4 with full_attn=True, which sees every token"),
        ({"full_attn": True, "distance_bias": True}, "distance_bias=True needs a window"),
        ({"k": [4, 4]}, "k has 2 values but n_layers is 1"),
        ({"max_len": -1}, "max_len is -1"),
        ({"n_heads": 3}, "d_model=16 is not divisible by n_heads=3"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"sharing": "all"}, "sharing is 'all'"),
        ({"projection": "none"}, "use full_attn=True"),
        ({"activation": "gelo"}, "activation is 'gelo'.* did you mean 'gelu'"),
        ({"positions": "rotary"}, "positions is 'rotary'"),
        ({"pad_id": 30}, "pad_id is 30 but vocab_size is 30"),
        ({"token_types": -1}, "token_types is -1"),
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"epsilon": "small"}, "epsilon is 'small'; it must be a number"),
        ({"pad_id": True}, "pad_id is True"),
        ({"k": True}, "k is True"),
        ({"n_classes": 1}, "the softmax over one class is always 1"),
        ({"slots": 200}, "slots=200 is more than block_length=128"),
        ({"n_classes": 0}, "n_classes is 0"),
        ({"pooling": "last"}, "pooling is 'last'"),
        ({"full_attn": "yes"}, "full_attn is 'yes'; it must be True or False"),
    ],
)
def test_invalid_options_of_models_raise(options, message):
    with pytest.raises(ValueError, match=message):
        Linformer(**{**SIZES, **options})


def test_decoders_have_no_window():
    with pytest.raises(ValueError, match=r"window_length is 4 in a causal layer.* choose block_length instead"):
        LinformerCausalLM(**SIZES, window_length=4)
    for slots in (2, None):
        with pytest.raises(ValueError, match=r"window_length is 4 in a causal layer.* choose block_length instead"):
            CausalLinearMultiHeadAttention(2, 4, slots=slots, window_length=4)
    with pytest.raises(ValueError, match="k is 0 in the last layer of the encoder, but cross-attention has as many"):
        LinformerSeq2Seq(**{**SIZES, "k": 0}, window_length=4)


def test_an_unknown_option_of_a_model_raises():
    with pytest.raises(TypeError, match="unknown option 'd_modle'; did you mean 'd_model'"):
        Linformer(d_modle=16)


@pytest.mark.parametrize("wrong", [-1, 30])
def test_ids_outside_the_vocabulary_raise(wrong):
    model = Linformer(**SIZES)
    model.compile("sgd", "sparse_categorical_crossentropy")
    bad = IDS.copy()
    bad[1, 3] = wrong
    message = f"input_ids contains values from {bad.min()} to {bad.max()}; only the integers 0 … 29 are allowed"
    for use in (model, lambda ids: model.predict(ids, verbose=0), lambda ids: model.fit(ids, np.zeros(4), verbose=0)):
        with pytest.raises(ValueError, match=message):
            use(bad)
    with pytest.raises(ValueError, match=message):
        model.evaluate({"input_ids": bad}, np.zeros(4), verbose=0)
    with pytest.raises(ValueError, match="token_type_ids contains values from 1 to 1; only the integers 0 … 0"):
        model.predict({"input_ids": IDS, "token_type_ids": np.ones_like(IDS)}, verbose=0)


def test_invalid_ids_inside_a_graph_give_nan():
    """A compiled graph cannot raise an error, and must not return a plausible output."""
    inputs = keras.Input((20,), dtype="int32")
    model = keras.Model(inputs, Linformer(**SIZES)(inputs))
    model.compile(jit_compile=not IS_TORCH)
    bad = IDS.copy()
    bad[1, 3] = 30
    if IS_TORCH:  # there is no graph
        with pytest.raises(ValueError, match="only the integers 0 … 29"):
            model.predict(bad, verbose=0)
        return
    probabilities = model.predict(bad, verbose=0)
    named = {name: keras.Input((20,), dtype="int32", name=name) for name in ("input_ids", "token_type_ids")}
    typed = keras.Model(named, Linformer(**SIZES)(named))
    types = np.zeros_like(IDS)
    types[2] = 1  # there is only type 0
    outputs = typed.predict({"input_ids": IDS, "token_type_ids": types}, verbose=0)
    assert np.isnan(outputs).any(axis=1).tolist() == [False, False, True, False]
    assert np.isnan(probabilities[1]).all()
    assert np.isfinite(probabilities[[0, 2, 3]]).all()


@pytest.mark.parametrize("symbolic", [False, True])
def test_invalid_shapes_of_ids_raise(symbolic):
    model = Linformer(**SIZES)

    def given(*shape):
        return keras.KerasTensor((None, *shape), "int32") if symbolic else np.ones((2, *shape), "int32")

    for shape in ((), (4, 5)):
        with pytest.raises(ValueError, match=r"input_ids has shape .*; it must be \(batch, length\)"):
            model(given(*shape))
    with pytest.raises(ValueError, match="the input has 33 tokens but the maximum is 32; truncate it"):
        model(given(33))
    with pytest.raises(ValueError, match="the input name is 'ids'; it must be one of"):
        model({"ids": given(5)})
    with pytest.raises(ValueError, match="input_ids are missing"):
        model({"attention_mask": given(5)})
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model({"input_ids": given(5), "attention_mask": given(6)})
    with pytest.raises(ValueError, match="a dict of input_ids and decoder_input_ids"):
        LinformerSeq2Seq(**SIZES)(given(5))


def test_ids_must_be_integers():
    with pytest.raises(ValueError, match="only the integers"):
        Linformer(**SIZES)(np.full((2, 5), 1.5))
    with pytest.raises(ValueError, match="input_ids is bool"):
        Linformer(**SIZES)(np.ones((2, 5), bool))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 13}, "the input has 33 tokens but the maximum is 32"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be larger than 0"),
        ({"temperature": 1.0, "top_k": 31}, "top_k is 31 but vocab_size is 30"),
        ({"top_k": 3}, "top_k is 3 but temperature is None"),
    ],
)
def test_invalid_options_of_generation_raise(options, message):
    model = LinformerCausalLM(**SIZES)
    with pytest.raises(ValueError, match=message):
        model.generate(IDS, **{"max_new_tokens": 3, **options})


def test_generation_from_empty_or_long_inputs_raises():
    with pytest.raises(ValueError, match=r"examples \[1\] have no real tokens"):
        LinformerCausalLM(**SIZES).generate(np.array([[3, 4], [0, 0]]))
    with pytest.raises(ValueError, match="the input has 40 tokens but the maximum is 32"):
        LinformerSeq2Seq(**SIZES).generate(np.ones((1, 40), int))


def test_former_names_of_options_are_accepted_with_a_warning():
    options = Options(k=4, max_len=8, vocab_size=5, d_model=4, d_ff=4, n_heads=2, n_layers=2)
    with pytest.warns(FutureWarning, match="from_keywords"):
        assert Options.of(options.to_dict()) == options
    with pytest.warns(FutureWarning, match="to_dict"):
        assert options.config() == options.to_dict()
    with pytest.warns(FutureWarning, match="k_per_layer"):
        assert options.k_of_layers == options.k_per_layer == [4, 4]
