"""Generation from the caches equals generation from the whole input, and the decoder learns to copy."""

import keras
import numpy as np
import pytest
from battery import cases, numpy, only_torch, randomize

from linformer_kit.keras import LinformerCausalLM, LinformerSeq2Seq

# one layer, because each graph is compiled; tests of what layers share use two
SIZES = {"k": 6, "max_len": 96, "vocab_size": 30, "d_model": 16, "d_ff": 24, "n_heads": 2, "n_layers": 1, "slots": 2}
RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 30, (3, 13))


def greedy(model, ids, steps, **source):
    """Greedy decoding from the whole input; padded to one length, so that one graph serves all steps."""
    first = ids.shape[1]
    ids = np.pad(ids, ((0, 0), (0, steps)))
    name = "decoder_input_ids" if source else "input_ids"
    for count in range(first, first + steps):
        is_known = np.broadcast_to(np.arange(first + steps) < count, ids.shape)
        mask = {} if source else {"attention_mask": is_known.astype("int32")}
        logits = model.predict_on_batch({**source, **mask, name: ids})
        ids[:, count] = logits[:, count - 1].argmax(axis=-1)
    return ids


# blocks that end within the prompt, with it, and never
@pytest.mark.parametrize(
    "options",
    cases(
        {"block_length": 4, "n_layers": 2},
        {"block_length": 13, "projection": "conv"},
        torch=[{"decoder_attention": "full"}],
    ),
)
def test_a_causal_lm_generates_from_its_cache(options):
    model = randomize(LinformerCausalLM(**{**SIZES, **options}, sharing="kv"))
    np.testing.assert_array_equal(model.generate(IDS, max_new_tokens=11), greedy(model, IDS, 11))


@pytest.mark.parametrize(
    "options",
    cases(
        {"full_attn": True},
        {"block_length": 4, "sharing": "layerwise", "projection": "dynamic", "n_layers": 2},
        torch=[{"block_length": 4}, {"block_length": 13, "projection": "conv"}, {"decoder_attention": "full"}],
    ),
)
def test_an_encoder_decoder_generates_from_its_cache(options):
    model = randomize(LinformerSeq2Seq(**{**SIZES, **options}, start_id=1))
    expected = greedy(model, np.ones((3, 1), int), 11, input_ids=IDS)
    np.testing.assert_array_equal(model.generate(IDS, max_new_tokens=11), expected)


def test_padding_of_prompts_never_changes_the_output():
    model = randomize(LinformerCausalLM(**SIZES, block_length=4))
    together = np.zeros((3, 13), int)
    for row, (length, first) in enumerate([(13, 0), (5, 8), (8, 2)]):  # whole, padded on the left, on both sides
        together[row, first : first + length] = IDS[row, :length]
    generated = model.generate(together, max_new_tokens=9)
    for row, length in enumerate((13, 5, 8)):
        alone = model.generate(np.repeat(IDS[row : row + 1, :length], 3, axis=0), max_new_tokens=9)
        np.testing.assert_array_equal(generated[row, 13:], alone[0, length:])
    np.testing.assert_array_equal(generated[:, :13], together)


def test_padding_follows_the_end_and_generation_stops_early():
    model = randomize(LinformerSeq2Seq(**SIZES, block_length=4, start_id=1))
    sampled = {"max_new_tokens": 11, "temperature": 2.0, "seed": 3}  # greedily, random weights repeat one token
    without_end = model.generate(IDS, **sampled)

    def lengths(end_id):
        return [list(row[1:]).index(end_id) + 1 if end_id in row[1:] else 11 for row in without_end]

    # one token that all examples generate early, if there is one, and one that they generate at different steps
    tokens = [int(token) for token in np.unique(without_end[:, 1:])]
    shortest = min(tokens, key=lambda token: max(lengths(token)))
    different = max(tokens, key=lambda token: max(lengths(token)) - min(lengths(token)))
    assert len(set(lengths(different))) > 1
    for end_id in {shortest, different}:
        ending = LinformerSeq2Seq.from_config({**model.get_config(), "end_id": end_id})
        ending.set_weights(model.get_weights())
        generated = ending.generate(IDS, **sampled)
        assert generated.shape[1] == max(lengths(end_id)) + 1
        for row, length in enumerate(lengths(end_id)):
            np.testing.assert_array_equal(generated[row, : length + 1], without_end[row, : length + 1])
            assert (generated[row, length + 1 :] == 0).all()


@only_torch  # test_keras.py compares the sampled tokens of the backends
def test_tokens_are_sampled_by_their_probabilities():
    model = randomize(LinformerCausalLM(**{**SIZES, "vocab_size": 5}, block_length=4))
    ids = np.repeat(IDS[:1] % 4 + 1, 2000, axis=0)
    sampled = model.generate(ids, max_new_tokens=1, temperature=2.0, seed=1)[:, -1]
    logits = numpy(model(ids[:1]))[0, -1] / 2.0
    expected = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    np.testing.assert_allclose(np.bincount(sampled, minlength=5) / 2000, expected, atol=0.03)
    np.testing.assert_array_equal(model.generate(ids, 1, temperature=2.0, seed=1)[:, -1], sampled)
    assert (model.generate(ids, 1, temperature=2.0, seed=2)[:, -1] != sampled).any()
    few = set(model.generate(ids, 1, temperature=2.0, top_k=2, seed=1)[:, -1])
    assert few == set(np.argsort(logits)[-2:])


def test_new_weights_are_used_and_compiled_loops_are_not_saved(tmp_path):
    model = randomize(LinformerCausalLM(**SIZES, block_length=4))
    layers, parameters = len(model.layers), model.num_params()
    before = model.generate(IDS, max_new_tokens=6)
    assert (len(model.layers), model.num_params()) == (layers, parameters)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        keras.models.load_model(tmp_path / "model.keras").generate(IDS, max_new_tokens=6), before
    )
    randomize(model)
    after = model.generate(IDS, max_new_tokens=6)
    np.testing.assert_array_equal(after, greedy(model, IDS, 6))
    assert (after != before).any()


@only_torch
def test_adapters_added_after_compilation_are_used():
    model = randomize(LinformerCausalLM(**SIZES, block_length=4))
    model.generate(IDS, max_new_tokens=4)
    outer = model.decoder.blocks[0].outer
    outer.enable_lora(2)
    for matrix in (outer.lora_kernel_a, outer.lora_kernel_b):
        matrix.assign(RNG.normal(size=matrix.shape))
    np.testing.assert_array_equal(model.generate(IDS, max_new_tokens=4), greedy(model, IDS, 4))


@only_torch
def test_it_learns_to_copy():
    source = RNG.integers(3, 30, (16, 6))
    target = np.concatenate([source, np.full((16, 1), 2)], axis=1)
    shifted = np.concatenate([np.ones((16, 1), int), source], axis=1)
    model = LinformerSeq2Seq(**{**SIZES, "dropout": 0.0}, block_length=4, start_id=1, end_id=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    # 150 epochs in one, which saves the overhead of each
    x = {"input_ids": np.tile(source, (150, 1)), "decoder_input_ids": np.tile(shifted, (150, 1))}
    model.fit(x, np.tile(target, (150, 1)), batch_size=16, shuffle=False, verbose=0)
    np.testing.assert_array_equal(model.generate(source, max_new_tokens=10)[:, 1:], target)


def test_prompts_of_many_shapes():
    model = randomize(LinformerCausalLM(**{**SIZES, "max_len": 200}, block_length=8))
    for batch, length in cases((1, 5), (2, 70), torch=[(2, 5), (1, 130), (3, 5)]):
        ids = RNG.integers(1, 30, (batch, length))
        np.testing.assert_array_equal(model.generate(ids, max_new_tokens=3), greedy(model, ids, 3))
    seq2seq = LinformerSeq2Seq(**{**SIZES, "max_len": 200}, block_length=8)
    for batch, length in cases(torch=[(1, 5), (2, 70), (3, 70)]):
        assert seq2seq.generate(RNG.integers(1, 30, (batch, length)), max_new_tokens=3).shape == (batch, 4)


@only_torch
def test_new_tokens_have_the_type_of_the_last():
    model = randomize(LinformerCausalLM(**SIZES, block_length=4, token_types=2))
    types = np.arange(12) % 2 * np.ones((3, 1), int)  # the last is 1
    generated = model.generate({"input_ids": IDS[:, :12], "token_type_ids": types}, max_new_tokens=5)
    continued = np.pad(types, ((0, 0), (0, 5)), mode="edge")
    real = np.ones_like(generated)  # 0 may be generated, and would be padding
    logits = numpy(model({"input_ids": generated, "token_type_ids": continued, "attention_mask": real}))
    np.testing.assert_array_equal(logits[:, 11:-1].argmax(axis=-1), generated[:, 12:])
    untyped = numpy(model({"input_ids": generated, "attention_mask": real}))
    assert (untyped[:, 11:-1].argmax(axis=-1) != generated[:, 12:]).any()
    assert model.generate(IDS.astype("float32"), max_new_tokens=5).dtype == np.int32
