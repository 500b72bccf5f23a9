"""The encoder-decoder: sizes of its decoder, its base model, and the checkpoints that it loads."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from zoo import build, config, ids, run

from linformer_kit import (
    LinformerForConditionalGeneration,
    LinformerForMaskedLM,
    LinformerModel,
    LinformerSeq2SeqModel,
)
from linformer_kit.bench.checks import plain_logits

SIZES = {
    "num_decoder_layers": 3,
    "decoder_vocab_size": 70,
    "decoder_hidden_size": 12,
    "decoder_num_attention_heads": 3,
    "decoder_intermediate_size": 20,
    "eos_token_id": 60,
}
every_size = pytest.mark.parametrize(
    "changes",
    [
        SIZES,
        {**SIZES, "sharing": "layerwise", "projection": "dynamic", "tie_word_embeddings": False},
        {**SIZES, "reversible": True, "decoder_intermediate_size": 0},
        {"decoder_hidden_size": 8, "embedding_size": 6, "num_key_value_heads": 1},
    ],
    ids=["sizes", "untied", "reversible", "factorised"],
)


@pytest.mark.usefixtures("float64")
@every_size
def test_a_decoder_has_its_own_sizes(changes, tmp_path):
    model, source = build(LinformerForConditionalGeneration, **changes), ids()
    target = torch.randint(3, model.decoder.config.vocab_size, (2, 9))
    logits, expected = model(source, decoder_input_ids=target).logits, plain_logits(model, source, target)
    assert logits.shape == (2, 9, changes.get("decoder_vocab_size", 50))
    assert_close(logits, expected)
    parameters = list(model.parameters())
    assert_close(*(torch.autograd.grad(one.square().sum(), parameters) for one in (logits, expected)))
    decoder, cross_attention = model.decoder.config, model.decoder.layers[-1].cross_attention
    assert (decoder.hidden_size, cross_attention.key.in_features) == (changes["decoder_hidden_size"], 16)
    assert len(model.decoder.layers) == changes.get("num_decoder_layers", 2)
    model.save_pretrained(tmp_path / "all")
    loaded = LinformerForConditionalGeneration.from_pretrained(tmp_path / "all").eval()
    assert_close(loaded(source, decoder_input_ids=target).logits, logits)
    model.decoder.save_pretrained(tmp_path / "decoder")  # by itself, with the width of its source
    encoded = model.encoder(source).last_hidden_state
    alone = LinformerModel.from_pretrained(tmp_path / "decoder").eval()
    for stack in (alone, model.decoder):
        assert_close(model.lm_head(model.head(stack(target, encoder_hidden_states=encoded)[0])), logits)


@every_size
@pytest.mark.parametrize("beams", [1, 3])
def test_a_decoder_of_its_own_sizes_generates(changes, beams):
    model = build(LinformerForConditionalGeneration, **changes)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "num_beams": beams, "no_repeat_ngram_size": 2}
    source = ids(1)
    cached, plain = (model.generate(source, do_sample=False, use_cache=one, **options) for one in (True, False))
    assert torch.equal(cached, plain)
    assert cached.shape == (1, 13)


def tied_to(model):
    words = {
        "source": model.encoder.get_input_embeddings().weight,
        "target": model.decoder.get_input_embeddings().weight,
    }
    return {name for name, weight in words.items() if weight is model.lm_head.weight}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"source", "target"}),
        ({"decoder_vocab_size": 70}, {"target"}),
        ({"decoder_vocab_size": 50}, {"target"}),  # of the same size, but another vocabulary
        ({"decoder_hidden_size": 8}, {"target"}),
        ({"decoder_hidden_size": 8, "embedding_size": 6}, {"source", "target"}),
        ({"decoder_vocab_size": 70, "tie_word_embeddings": False}, set()),
        ({"decoder_hidden_size": 8, "tie_word_embeddings": False}, set()),
    ],
)
def test_what_can_be_tied_is_tied_and_resized(changes, expected, tmp_path):
    model = build(LinformerForConditionalGeneration, **changes)
    assert tied_to(model) == expected
    source, target = ids(), ids(2, 9)
    before = run(model, source, decoder_input_ids=target)
    model.resize_token_embeddings(57)
    sizes = {"encoder": 57, "decoder": 57}
    if "decoder_vocab_size" in changes:
        model.resize_decoder_token_embeddings(75)
        sizes["decoder"] = 75
    else:
        with pytest.raises(ValueError, match="have one vocabulary; call resize_token_embeddings"):
            model.resize_decoder_token_embeddings(75)
    assert tied_to(model) == expected
    after = run(model, source, decoder_input_ids=target)
    assert after.shape[-1] == model.lm_head.out_features == sizes["decoder"]
    assert_close(after[..., : before.shape[-1]], before)
    for name, size in sizes.items():
        stack = model.get_submodule(f"model.{name}")
        assert (stack.get_input_embeddings().num_embeddings, stack.config.vocab_size) == (size, size)
    model.save_pretrained(tmp_path)
    loaded = LinformerForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert tied_to(loaded) == expected
    assert_close(run(loaded, source, decoder_input_ids=target), after)


def test_ids_are_checked_against_their_own_vocabulary():
    model = build(LinformerForConditionalGeneration, **SIZES)
    target = torch.full((1, 4), 69)
    assert model(ids(1), labels=target).loss.isfinite()
    with pytest.raises(ValueError, match="labels has 70; only 0 … 69 are allowed"):
        model(ids(1), labels=target + 1)
    with pytest.raises(ValueError, match="input_ids"):
        model(torch.full((1, 4), 50), labels=target)
    for wrong, message in [
        ({"eos_token_id": 70}, "eos_token_id is 70 but decoder_vocab_size is 70; choose one of 0 … 69"),
        ({"pad_token_id": 55}, "pad_token_id is 55 but vocab_size is 50"),
        ({"decoder_vocab_size": 20, "eos_token_id": 2, "pad_token_id": 30}, "but decoder_vocab_size is 20"),
        ({"decoder_hidden_size": 10}, "decoder_hidden_size=10 is not divisible by decoder_num_attention_heads=3"),
        ({"num_key_value_heads": 2}, "decoder_num_attention_heads=3 is not divisible by num_key_value_heads=2"),
        ({"decoder_intermediate_size": -1}, r"decoder_intermediate_size is -1; it must be 0 \(no feed-forward\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            config(**{**SIZES, **wrong})


def test_the_conventions_of_transformers():
    model, source, target = build(LinformerForConditionalGeneration), ids(), ids(2, 9)
    base = model.base_model
    assert isinstance(base, LinformerSeq2SeqModel)
    assert base is model.model is base.base_model
    for one in (model, base):
        assert (one.get_encoder(), one.get_decoder()) == (base.encoder, base.decoder)
        positions = one.get_position_embeddings()
        assert positions == (base.encoder.get_position_embeddings(), base.decoder.get_position_embeddings())
        assert positions[0] is base.encoder.embeddings.position_embeddings
    hidden = base(source, decoder_input_ids=target, output_attentions=True)
    assert_close(model.lm_head(hidden.last_hidden_state), model(source, decoder_input_ids=target).logits)
    assert [len(one) for one in (hidden.encoder_attentions, hidden.cross_attentions)] == [2, 2]
    encoder = build(LinformerModel)
    model.set_encoder(encoder)
    assert model.encoder is base.encoder is encoder
    assert model.config.get_text_config() is model.config
    assert config(**SIZES).get_text_config(decoder=True).vocab_size == 70


@pytest.mark.parametrize("tied", [True, False])
def test_checkpoints_of_earlier_versions_are_loaded(tied, tmp_path):
    model, source = build(LinformerForConditionalGeneration, tie_word_embeddings=tied), ids()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(name.startswith(("model.encoder.", "model.decoder.", "lm_head.")) for name in stored)
    earlier = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    save_file(earlier, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, found = LinformerForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert torch.equal(run(loaded.eval(), source), run(model, source))
    other = build(LinformerForConditionalGeneration, tie_word_embeddings=tied)
    other.load_state_dict({name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()})
    assert torch.equal(run(other, source), run(model, source))
    loaded.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == stored.keys()


@pytest.mark.parametrize("sharing", ["headwise", "layerwise"])
@pytest.mark.parametrize("model_class", [LinformerModel, LinformerForMaskedLM])
def test_the_checkpoint_of_an_encoder_is_loaded_into_the_encoder(model_class, sharing, tmp_path):
    saved = build(model_class, sharing=sharing)
    saved.save_pretrained(tmp_path / "encoder")
    model, found = LinformerForConditionalGeneration.from_pretrained(tmp_path / "encoder", output_loading_info=True)
    expected = saved.base_model.state_dict()
    assert model.encoder.state_dict().keys() == expected.keys()
    for name, tensor in model.encoder.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    base = LinformerSeq2SeqModel.from_pretrained(tmp_path / "encoder")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in base.encoder.state_dict().items())
    tied = {"model.decoder.embeddings.word_embeddings.weight", "lm_head.weight"}
    new = {name for name, _ in model.named_parameters() if "model.decoder." in name}
    assert set(found["missing_keys"]) - tied == new - tied  # and transformers warns of them
    model.save_pretrained(tmp_path / "both")
    stored = load_file(tmp_path / "both" / "model.safetensors")
    assert all(name.startswith(("model.encoder.", "model.decoder.", "lm_head.")) for name in stored)
    loaded, found = LinformerForConditionalGeneration.from_pretrained(tmp_path / "both", output_loading_info=True)
    assert not any(found.values())
    source = ids()
    assert torch.equal(run(loaded.eval(), source), run(model.eval(), source))
