"""Generation: the cache changes nothing but the cost, padding changes nothing at all, and nothing leaks."""

from unittest.mock import patch

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache
from zoo import CAUSAL_VARIANTS, VARIANTS, VOCABULARY, build, ids

from linformer_kit import LinformerAttention, LinformerCache, LinformerForCausalLM, LinformerForConditionalGeneration

GENERATORS = [LinformerForCausalLM, LinformerForConditionalGeneration]
every_generator = pytest.mark.parametrize("model_class", GENERATORS, ids=lambda model: model.__name__)
every_variant = pytest.mark.parametrize("variant", CAUSAL_VARIANTS)
STRATEGIES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "sampled beams": {"num_beams": 3, "do_sample": True},
}


def generate(model, input_ids, seed=0, **options):
    torch.manual_seed(seed)
    # without repetition, so that small random models say more than one word
    return model.generate(input_ids, max_new_tokens=15, min_new_tokens=15, no_repeat_ngram_size=2, **options)


def left_padded(texts):
    length = max(text.shape[1] for text in texts)
    padded = torch.cat([torch.nn.functional.pad(text, (length - text.shape[1], 0), value=0) for text in texts])
    return padded, (padded != 0).long()


@every_generator
@every_variant
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_and_without_cache_the_tokens_are_the_same(model_class, variant, strategy):
    model = build(model_class, max_position_embeddings=64, **VARIANTS[variant])
    padded, mask = left_padded([ids(1, 13), ids(1, 6)])
    options = {**STRATEGIES[strategy], "attention_mask": mask}
    cached, uncached = (generate(model, padded, use_cache=use_cache, **options) for use_cache in (True, False))
    assert torch.equal(cached, uncached)
    assert len(cached[:, -15:].unique()) > 2  # it says something


@every_generator
@every_variant
@pytest.mark.parametrize("strategy", ["greedy", "beams"])
def test_a_padded_batch_generates_what_each_text_generates_alone(model_class, variant, strategy):
    model = build(model_class, max_position_embeddings=64, **VARIANTS[variant])
    texts = [ids(1, 13), ids(1, 6), ids(1, 1)]
    padded, mask = left_padded(texts)
    together = generate(model, padded, attention_mask=mask, **STRATEGIES[strategy])
    alone = torch.cat([generate(model, text, **STRATEGIES[strategy])[:, -15:] for text in texts])
    assert torch.equal(together[:, -15:], alone)


@every_variant
def test_logits_from_the_cache_are_those_of_the_whole(variant):
    model = build(LinformerForCausalLM, **VARIANTS[variant])
    input_ids = ids(2, 27)
    mask = torch.arange(27) >= torch.tensor([[0], [5]])
    for real in (None, mask):
        whole = model(input_ids, attention_mask=real, use_cache=False).logits
        cache, pieces, seen = None, [], 0
        for piece in input_ids.split([9, 1, 1, 6, 1, 1, 1, 7], dim=1):
            seen += piece.shape[1]
            output = model(
                piece, attention_mask=None if real is None else real[:, :seen], past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            pieces.append(output.logits)
        assert cache.get_seq_length() == 27
        where = mask if real is not None else torch.ones_like(mask)
        assert_close(torch.cat(pieces, dim=1)[where], whole[where], rtol=1e-4, atol=1e-5)


@every_variant
def test_no_token_of_a_decoder_attends_to_a_later_one(variant):
    for model_class in GENERATORS:
        model = build(model_class, **VARIANTS[variant])
        words = torch.randn(1, 21, model.config.embedding_width, requires_grad=True)
        if model_class is LinformerForCausalLM:
            logits = model(inputs_embeds=words, use_cache=False).logits
        else:
            logits = model(ids(1), decoder_inputs_embeds=words, use_cache=False).logits
        for position in (0, 3, 4, 11, 19):
            (gradient,) = torch.autograd.grad(logits[0, position].sum(), words, retain_graph=True)
            assert not gradient[0, position + 1 :].any()
            assert gradient[0, : position + 1].abs().sum(dim=-1).all()  # and all before it are seen


def test_the_cache_holds_slots_rows_for_each_block_and_the_open_block():
    model = build(LinformerForCausalLM, position_embedding="sinusoidal")  # blocks of 4, 2 slots
    full = build(LinformerForCausalLM, position_embedding="sinusoidal", decoder_attention="full")
    width, layers = 16, 2
    for length in (3, 4, 30, 16_385):
        with torch.no_grad():
            cache = model(ids(1, length), logits_to_keep=1).past_key_values
            reference = full(ids(1, length), logits_to_keep=1).past_key_values
        blocks, still_open = length // 4, length % 4
        # keys and values of summaries; of the open block also the tokens, which become summaries later
        assert cache.nbytes == layers * 4 * width * (2 * 2 * blocks + 3 * still_open)
        assert reference.nbytes == layers * 4 * width * (2 * 4 * blocks + 3 * still_open)


@pytest.mark.parametrize("length", [20, 31])
def test_a_source_is_projected_once_to_the_same_number_of_rows_whatever_its_length(length):
    model = build(LinformerForConditionalGeneration)
    project = LinformerAttention.project
    with patch.object(LinformerAttention, "project", autospec=True, side_effect=project) as spy:
        output = generate(model, ids(2, length), do_sample=False, return_dict_in_generate=True)
    cross_attentions = [layer.cross_attention for layer in model.decoder.layers]
    projected = [call.args[0] for call in spy.call_args_list]
    assert [projected.count(attention) for attention in cross_attentions] == [1, 1]
    for layer in output.past_key_values.layers:
        assert layer.source.keys_BGKD.shape == (2, 2, 5, 8)


def test_generation_resumes_from_a_cache():
    model = build(LinformerForCausalLM, max_position_embeddings=64)
    prompt = ids(2, 10)
    first = generate(model, prompt, do_sample=False, return_dict_in_generate=True)
    question = torch.cat([first.sequences, ids(2, 7)], dim=1)
    again = generate(model, question, do_sample=False, past_key_values=first.past_key_values)
    assert torch.equal(again, generate(model, question, do_sample=False))


def test_a_prompt_can_be_prefilled_in_chunks():
    model = build(LinformerForCausalLM, max_position_embeddings=64)
    padded, mask = left_padded([ids(1, 20), ids(1, 6)])  # the first pieces of the second are padding
    options = {"attention_mask": mask, "do_sample": False}
    assert torch.equal(generate(model, padded, prefill_chunk_size=7, **options), generate(model, padded, **options))
    with pytest.raises(ValueError, match=r"no real token in examples \[1\]"):
        generate(model, padded, attention_mask=mask * torch.tensor([[1], [0]]))


def test_the_cache_of_a_translator_has_the_layers_of_its_decoder():
    model = build(LinformerForConditionalGeneration, num_decoder_layers=3)
    cache = LinformerCache(model.config)
    model(ids(), decoder_input_ids=ids(2, 5), past_key_values=cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [5, 5, 5]


@pytest.mark.parametrize("cached", [0, 13])
def test_weights_of_full_attention_are_those_over_all_tokens_so_far(cached):
    model, input_ids = build(LinformerForCausalLM, decoder_attention="full"), ids()
    cache = model(input_ids[:, :cached]).past_key_values if cached else None
    weights = model(input_ids[:, cached:], past_key_values=cache, output_attentions=True).attentions[0]
    layer = model.model.layers[0]
    x = layer.attention_residual.norm(model(input_ids, output_hidden_states=True).hidden_states[0])
    query, keys = (
        linear(x).unflatten(-1, (2, 8)).transpose(1, 2) for linear in (layer.attention.query, layer.attention.key)
    )
    later = torch.ones(21, 21, dtype=torch.bool).triu(1)
    expected = (query @ keys.transpose(-1, -2) / 8**0.5).masked_fill(later, -torch.inf).softmax(dim=-1)
    assert_close(weights, expected[:, :, cached:])


def test_a_cache_can_be_made_repeated_selected_and_reset():
    model, input_ids = build(LinformerForCausalLM), ids(2, 10)
    cache = LinformerCache(model.config)
    model(input_ids, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    following = ids(2, 1)
    expected = model(torch.cat([input_ids[[1, 0]], following], dim=1)).logits[:, -1:]
    assert_close(model(following, past_key_values=cache).logits, expected)
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    with pytest.raises(NotImplementedError, match="tokens cannot be removed from the summaries"):
        cache.crop(-1)


def test_the_source_follows_the_examples_that_are_selected():
    model, sources, targets = build(LinformerForConditionalGeneration), ids(3, 20), ids(3, 6)
    cache = model(sources, decoder_input_ids=targets[:, :5]).past_key_values
    chosen = torch.tensor([2, 0])
    cache.batch_select_indices(chosen)
    expected = model(sources[chosen], decoder_input_ids=targets[chosen]).logits[:, -1:]
    answer = model(sources[chosen], decoder_input_ids=targets[chosen][:, 5:], past_key_values=cache).logits
    assert_close(answer, expected)


def test_caches_of_other_kinds_and_speculation_are_refused():
    model = build(LinformerForCausalLM)
    with pytest.raises(TypeError, match="is a DynamicCache; it must be the LinformerCache"):
        model(ids(), past_key_values=DynamicCache())
    with pytest.raises(
        ValueError, match="cache_implementation is 'static', but a Linformer always uses a LinformerCache; leave it out"
    ):
        model.generate(ids(1), max_new_tokens=5, cache_implementation="static")
    with pytest.raises(ValueError, match="stateful"):
        model.generate(ids(1), max_new_tokens=5, prompt_lookup_num_tokens=3)


def test_generation_stops_at_the_end_and_pads():
    model = build(LinformerForConditionalGeneration)
    free = model.generate(ids(3), max_new_tokens=20, do_sample=False, eos_token_id=None)
    stop = int(free[0, 4])
    stopped = model.generate(ids(3), max_new_tokens=20, do_sample=False, eos_token_id=stop)
    for row in stopped[:, 1:]:
        places = (row == stop).nonzero()
        if len(places):
            assert not row[places[0, 0] + 1 :].any()


def test_logits_to_keep_computes_the_last_tokens_only():
    model, input_ids = build(LinformerForCausalLM), ids()
    logits = model(input_ids).logits
    assert_close(model(input_ids, logits_to_keep=3).logits, logits[:, -3:])
    assert_close(model(input_ids, logits_to_keep=torch.tensor([2, 5])).logits, logits[:, [2, 5]])
    assert logits.shape == (2, 21, VOCABULARY)
