"""Generation from what is kept is generation from everything; with it the decoder learns to copy."""

import keras
import numpy as np
import pytest
from battery import numpy, randomise

from linformer_kit.keras import LinformerCausalLM, LinformerSeq2Seq

SIZES = {"k": 6, "max_len": 96, "vocab_size": 30, "d_model": 16, "d_ff": 24, "n_heads": 2, "n_layers": 2, "slots": 2}
RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 30, (3, 13))
# blocks that end within the prompt, with it, and never
WAYS = [{"block_length": 4}, {"block_length": 13, "projection": "conv"}, {"decoder_attention": "full"}]


def greedily(model, ids, steps, **source):
    """The likeliest token each time, the whole input read again for each; padded to one length, for one graph to serve all."""
    first = ids.shape[1]
    ids = np.pad(ids, ((0, 0), (0, steps)))
    name = "decoder_input_ids" if source else "input_ids"
    for count in range(first, first + steps):
        mask = (
            {}
            if source
            else {"attention_mask": np.broadcast_to(np.arange(first + steps) < count, ids.shape).astype("int32")}
        )
        logits = model.predict_on_batch({**source, **mask, name: ids})
        ids[:, count] = logits[:, count - 1].argmax(axis=-1)
    return ids


@pytest.mark.parametrize("options", WAYS)
def test_what_is_kept_is_enough(options):
    model = randomise(LinformerCausalLM(**SIZES, **options, sharing="kv"))
    np.testing.assert_array_equal(model.generate(IDS, max_new_tokens=11), greedily(model, IDS, 11))


@pytest.mark.parametrize(
    "options", [*WAYS, {"full_attn": True}, {"block_length": 4, "sharing": "layerwise", "projection": "dynamic"}]
)
def test_what_is_kept_of_source_and_target_is_enough(options):
    model = randomise(LinformerSeq2Seq(**SIZES, **options, start_id=1))
    expected = greedily(model, np.ones((3, 1), int), 11, input_ids=IDS)
    np.testing.assert_array_equal(model.generate(IDS, max_new_tokens=11), expected)


def test_prompts_of_different_lengths_go_on_as_each_alone():
    model = randomise(LinformerCausalLM(**SIZES, block_length=4))
    together = np.zeros((3, 13), int)
    for row, (length, first) in enumerate([(13, 0), (5, 8), (8, 2)]):  # whole, padded on the left, on both sides
        together[row, first : first + length] = IDS[row, :length]
    generated = model.generate(together, max_new_tokens=9)
    for row, length in enumerate((13, 5, 8)):
        alone = model.generate(IDS[row : row + 1, :length], max_new_tokens=9)
        np.testing.assert_array_equal(generated[row, 13:], alone[0, length:])
    np.testing.assert_array_equal(generated[:, :13], together)


def test_behind_the_end_stands_padding_and_no_more_than_needed():
    model = randomise(LinformerSeq2Seq(**SIZES, block_length=4, start_id=1))
    endless = model.generate(IDS, max_new_tokens=11)
    config = {**model.get_config(), "end_id": int(endless[0, 4])}
    ending = LinformerSeq2Seq.from_config(config)
    ending.set_weights(model.get_weights())
    generated = ending.generate(IDS, max_new_tokens=11)
    ends = [list(row[1:]).index(config["end_id"]) + 1 if config["end_id"] in row[1:] else 11 for row in endless]
    assert generated.shape[1] == max(ends) + 1
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(generated[row, : end + 1], endless[row, : end + 1])
        assert (generated[row, end + 1 :] == 0).all()


def test_tokens_are_drawn_by_their_probabilities():
    model = randomise(LinformerCausalLM(**{**SIZES, "vocab_size": 5, "n_layers": 1}, block_length=4))
    ids = np.repeat(IDS[:1] % 4 + 1, 4000, axis=0)
    drawn = model.generate(ids, max_new_tokens=1, temperature=2.0, seed=1)[:, -1]
    logits = numpy(model(ids[:1]))[0, -1] / 2.0
    expected = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 4000, expected, atol=0.03)
    np.testing.assert_array_equal(model.generate(ids, 1, temperature=2.0, seed=1)[:, -1], drawn)
    assert (model.generate(ids, 1, temperature=2.0, seed=2)[:, -1] != drawn).any()
    few = set(model.generate(ids, 1, temperature=2.0, top_k=2, seed=1)[:, -1])
    assert few == set(np.argsort(logits)[-2:])
    np.testing.assert_array_equal(
        model.generate(IDS[:1] % 4 + 1, 5, temperature=1.0, top_k=1), model.generate(IDS[:1] % 4 + 1, 5)
    )


def test_new_weights_are_used_and_the_loop_is_not_part_of_the_model(tmp_path):
    model = randomise(LinformerCausalLM(**SIZES, block_length=4))
    layers, parameters = len(model.layers), model.num_params()
    before = model.generate(IDS, max_new_tokens=6)
    assert (len(model.layers), model.num_params()) == (layers, parameters)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        keras.models.load_model(tmp_path / "model.keras").generate(IDS, max_new_tokens=6), before
    )
    randomise(model)
    after = model.generate(IDS, max_new_tokens=6)
    np.testing.assert_array_equal(after, greedily(model, IDS, 6))
    assert (after != before).any()


def test_adapters_added_later_are_used():
    model = randomise(LinformerCausalLM(**SIZES, block_length=4))
    model.generate(IDS, max_new_tokens=4)
    outer = model.decoder.blocks[0].outer
    outer.enable_lora(2)
    for matrix in (outer.lora_kernel_a, outer.lora_kernel_b):
        matrix.assign(RNG.normal(size=matrix.shape))
    np.testing.assert_array_equal(model.generate(IDS, max_new_tokens=4), greedily(model, IDS, 4))


def test_it_learns_to_copy():
    source = RNG.integers(3, 30, (16, 6))
    target = np.concatenate([source, np.full((16, 1), 2)], axis=1)
    shifted = np.concatenate([np.ones((16, 1), int), source], axis=1)
    model = LinformerSeq2Seq(**{**SIZES, "dropout": 0.0, "n_layers": 1}, block_length=4, start_id=1, end_id=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    model.fit({"input_ids": source, "decoder_input_ids": shifted}, target, epochs=150, verbose=0)
    np.testing.assert_array_equal(model.generate(source, max_new_tokens=10)[:, 1:], target)


def test_prompts_of_many_shapes_in_turn():
    model = randomise(LinformerCausalLM(**{**SIZES, "max_len": 200}, block_length=8))
    for batch, length in ((1, 5), (2, 5), (3, 70), (1, 130), (3, 5)):
        ids = RNG.integers(1, 30, (batch, length))
        np.testing.assert_array_equal(model.generate(ids, max_new_tokens=3), greedily(model, ids, 3))
    source = LinformerSeq2Seq(**{**SIZES, "max_len": 200}, block_length=8)
    for batch, length in ((1, 5), (2, 70), (3, 70)):
        assert source.generate(RNG.integers(1, 30, (batch, length)), max_new_tokens=3).shape == (batch, 4)


def test_new_tokens_are_of_the_kind_of_the_last():
    model = randomise(LinformerCausalLM(**SIZES, block_length=4, token_types=2))
    ids, types = IDS, np.arange(13) % 2 * np.ones_like(IDS)
    generated = model.generate({"input_ids": ids, "token_type_ids": types}, max_new_tokens=5)
    for _ in range(5):
        logits = numpy(model({"input_ids": ids, "token_type_ids": types, "attention_mask": np.ones_like(ids)}))
        ids = np.concatenate([ids, logits[:, -1:].argmax(axis=-1)], axis=1)
        types = np.concatenate([types, types[:, -1:]], axis=1)
    np.testing.assert_array_equal(generated, ids)
    assert model.generate(IDS.astype("float32"), max_new_tokens=2).dtype == np.int32
