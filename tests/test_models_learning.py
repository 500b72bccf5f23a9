"""Models fit learnable data and stay at chance on random data."""

import pytest
import torch
from zoo import config, ids

from linformer_kit import LinformerForCausalLM, LinformerForConditionalGeneration, LinformerForMaskedLM


def train(model, steps, make_inputs, rate=1e-2):
    """The loss of every step."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        loss = model(**make_inputs()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("projection", ["linear", "dynamic", "none"])
def test_a_masked_lm_overfits_a_few_texts(projection):
    model = LinformerForMaskedLM(config(hidden_size=64, intermediate_size=128, projection=projection))
    texts, hidden, mask_id = ids(4, 30), torch.rand(4, 30) < 0.3, 1
    inputs = {"input_ids": texts.masked_fill(hidden, mask_id), "labels": texts.masked_fill(~hidden, -100)}
    assert train(model, 150, lambda: inputs)[-1] < 0.02
    filled = model.eval()(inputs["input_ids"]).logits.argmax(dim=-1)
    assert torch.equal(filled[hidden], texts[hidden])


@pytest.mark.parametrize("decoder_attention", ["causal", "full"])
def test_a_causal_lm_overfits_a_few_texts(decoder_attention):
    model = LinformerForCausalLM(config(hidden_size=64, intermediate_size=128, decoder_attention=decoder_attention))
    texts = ids(4, 30)
    assert train(model, 150, lambda: {"input_ids": texts, "labels": texts})[-1] < 0.3  # the first words cannot be known
    recited = model.eval().generate(texts[:, :3], max_new_tokens=27, do_sample=False, eos_token_id=None)
    assert torch.equal(recited, texts)


@pytest.mark.parametrize("decoder_attention", ["causal", "full"])
def test_an_encoder_decoder_overfits_a_few_pairs(decoder_attention):
    model = LinformerForConditionalGeneration(
        config(hidden_size=64, intermediate_size=128, decoder_attention=decoder_attention)
    )
    sources, targets = ids(4, 30), ids(4, 12)
    assert train(model, 150, lambda: {"input_ids": sources, "labels": targets})[-1] < 0.02
    recited = model.eval().generate(sources, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(recited[:, 1:], targets)
    assert torch.equal(
        model.generate(sources, max_new_tokens=12, num_beams=3, do_sample=False, eos_token_id=None)[:, 1:], targets
    )


@pytest.mark.parametrize("decoder_attention", ["causal", "full"])
def test_on_random_data_a_causal_model_stays_at_the_entropy(decoder_attention):
    """Fresh random tokens every step: only a leak from the future could do better than log V."""
    model = LinformerForCausalLM(
        config(hidden_size=32, vocab_size=16, decoder_attention=decoder_attention, pad_token_id=None, eos_token_id=None)
    )

    def fresh():
        tokens = torch.randint(16, (16, 24))
        return {"input_ids": tokens, "labels": tokens}

    losses = train(model, 300, fresh, rate=3e-3)
    entropy = torch.tensor(16.0).log().item()
    assert sum(losses[-100:]) / 100 > entropy - 0.005  # 100 steps of 368 tokens: the mean of log-losses is that exact
    assert sum(losses[-100:]) / 100 < entropy + 0.05  # and it has learned that there is nothing to learn
