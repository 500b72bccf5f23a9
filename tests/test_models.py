"""One battery over every model: the common behavior of transformers models."""

import copy
import json
import os
import subprocess
import sys
import textwrap

import accelerate
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertModel,
)
from zoo import (
    CAUSAL_VARIANTS,
    LENGTH,
    MODELS,
    VARIANTS,
    VOCABULARY,
    build,
    config,
    ids,
    is_per_token,
    labels_for,
    loss_of,
    run,
)

from linformer_kit import (
    LinformerForCausalLM,
    LinformerForConditionalGeneration,
    LinformerForMaskedLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)
from linformer_kit.bench.checks import plain_hidden_states, plain_logits

AUTO = dict(
    zip(
        MODELS,
        [
            AutoModel,
            AutoModelForMaskedLM,
            AutoModelForSequenceClassification,
            AutoModelForTokenClassification,
            AutoModelForQuestionAnswering,
            AutoModelForCausalLM,
            AutoModelForSeq2SeqLM,
        ],
        strict=True,
    )
)
every_model = pytest.mark.parametrize("model_class", MODELS, ids=lambda model: model.__name__)
every_variant = pytest.mark.parametrize("variant", VARIANTS)
# every variant of what it changes: the encoder under a head that reads the mask, the decoder, and both with
# cross-attention between them; the other heads use the same encoder
COMPLETE = (LinformerForSequenceClassification, LinformerForCausalLM, LinformerForConditionalGeneration)
OTHERS = [model_class for model_class in MODELS if model_class not in COMPLETE]


def pairs(models, variants=tuple(VARIANTS)):
    """Every valid pair of a model and a variant."""
    return [
        pytest.param(model_class, variant, id=f"{variant}-{model_class.__name__}")
        for variant in variants
        for model_class in models
        if model_class is not LinformerForCausalLM or variant in CAUSAL_VARIANTS
    ]


every_combination = pytest.mark.parametrize(
    ("model_class", "variant"), [*pairs(COMPLETE), *pairs(OTHERS, ("default", "layerwise", "untied"))]
)


@every_combination
def test_every_parameter_of_every_model_gets_a_gradient(model_class, variant):
    model = build(model_class, **VARIANTS[variant])
    input_ids = ids()
    loss_of(
        model, input_ids, token_type_ids=torch.randint(2 if model.config.type_vocab_size else 1, input_ids.shape)
    ).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or name.endswith("key.bias"), (
            name
        )  # a softmax does not see what it adds to all keys


@every_combination
def test_a_padded_batch_gives_each_text_what_it_gets_alone(model_class, variant):
    model = build(model_class, **VARIANTS[variant])
    texts = [ids(1, length) for length in (LENGTH, 13, 1, 8)]
    for side in ("right", "left", "scattered"):
        places = []
        for text in texts:
            places.append(
                {
                    "right": torch.arange(text.shape[1]),
                    "left": torch.arange(LENGTH - text.shape[1], LENGTH),
                    "scattered": torch.randperm(LENGTH)[: text.shape[1]].sort().values,
                }[side]
            )
        padded, mask = ids(len(texts)), torch.zeros(len(texts), LENGTH, dtype=torch.long)
        for row, (text, place) in enumerate(zip(texts, places, strict=True)):
            padded[row, place], mask[row, place] = text[0], 1
        together = run(model, padded, attention_mask=mask)
        for row, (text, place) in enumerate(zip(texts, places, strict=True)):
            alone = run(model, text)[0]
            assert_close(together[row, place] if is_per_token(model) else together[row], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("embedded", [False, True], ids=["ids", "inputs_embeds"])
@every_variant
def test_a_packed_batch_gives_what_masks_give(variant, embedded):
    model, texts, mask, shapes = build(LinformerModel, **VARIANTS[variant]), ids(4), torch.rand(4, LENGTH) > 0.5, []
    mask[1] = mask[0].flip(0)  # as many tokens
    inputs = {"input_ids": texts, "attention_mask": mask}
    if model.config.type_vocab_size:
        inputs["token_type_ids"] = torch.randint(2, texts.shape)
    leaves = list(model.parameters())
    if embedded:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
        leaves.append(inputs["inputs_embeds"])
    model.layers[0].attention_residual.norm.register_forward_hook(lambda *hooked: shapes.append(hooked[1][0].shape))

    def answers_and_gradients(**options):
        with torch.no_grad():
            fast = model(**inputs, **options).last_hidden_state
        answer = model(**inputs, **options).last_hidden_state
        weight = torch.linspace(-1, 1, answer.numel()).view_as(answer)
        return fast, answer, *torch.autograd.grad((answer * weight).sum(), leaves, allow_unused=True)

    packed, masked = answers_and_gradients(), answers_and_gradients(output_hidden_states=True)
    for one, other in zip(packed, masked, strict=True):
        assert_close(one, other)
    assert shapes[0] == shapes[1] == (1, mask.sum(), 16)
    assert shapes[-1] == (*mask.shape, 16)


@every_combination
def test_eager_and_fused_attention_agree(model_class, variant, monkeypatch):
    model, input_ids = build(model_class, **VARIANTS[variant]), ids()
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])
    labels = labels_for(model, input_ids)

    def answer_and_gradients(model):
        answer = run(model, input_ids, attention_mask=mask)
        loss = model(input_ids, attention_mask=mask, **labels).loss if labels else answer.square().mean()
        return answer, *torch.autograd.grad(loss, list(model.parameters()))

    assert model.config._attn_implementation == "sdpa"
    fused = answer_and_gradients(model)
    loaded = model_class.from_pretrained(
        None, config=model.config, state_dict=model.state_dict(), attn_implementation="eager"
    )
    model.set_attn_implementation("eager")
    monkeypatch.setattr(functional, "scaled_dot_product_attention", None)  # calling it would raise
    for eager in (model, loaded.eval()):
        assert_close(answer_and_gradients(eager), fused, rtol=1e-4, atol=1e-5)


def test_the_attention_implementation_is_switched_at_run_time(monkeypatch):
    calls, kernel = [], functional.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(1)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    for model in (build(LinformerModel, projection="none"), build(LinformerForConditionalGeneration)):
        for implementation, is_fused in (("sdpa", True), ("eager", False), ("sdpa", True)):
            model.set_attn_implementation(implementation)
            calls.clear()
            run(model, ids())
            assert bool(calls) is is_fused


@every_combination
def test_saving_and_loading_through_the_auto_class_keeps_the_outputs(model_class, variant, tmp_path):
    model, input_ids = build(model_class, **VARIANTS[variant]), ids()
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1  # in shards
    assert not list(tmp_path.glob("*.bin"))
    loaded, report = AUTO[model_class].from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is model_class
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(run(loaded.eval(), input_ids), run(model, input_ids))
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()


@every_combination
def test_nothing_is_left_uninitialized(model_class, variant, tmp_path):
    """Deterministic algorithms fill fresh memory with NaN; loading starts on the meta device."""
    torch.use_deterministic_algorithms(True)
    try:
        fresh = model_class(config(**VARIANTS[variant]))
        fresh.save_pretrained(tmp_path / "whole")
        loaded = model_class.from_pretrained(tmp_path / "whole")
        # weights that are not in the file are initialized, not left as uninitialized memory
        base = fresh if isinstance(fresh, LinformerModel | LinformerForConditionalGeneration) else fresh.model
        base.save_pretrained(tmp_path / "base")
        warm = model_class.from_pretrained(tmp_path / "base")
        for model in (fresh, loaded, warm):
            assert all(tensor.isfinite().all() for tensor in (*model.state_dict().values(), *model.buffers()))
            assert run(model, ids()).isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("variant", ["default", "layerwise", "dynamic", "conv", "random"])
def test_a_projection_that_a_checkpoint_lacks_starts_as_a_fresh_one(variant):
    """Loading starts on the meta device: weights that are not in the file must be initialized explicitly."""
    torch.use_deterministic_algorithms(True)
    try:
        fresh = LinformerModel(config(**VARIANTS[variant]))
        without = {name: tensor for name, tensor in fresh.state_dict().items() if "projection" not in name}
        assert len(without) < len(fresh.state_dict())
        loaded = LinformerModel.from_pretrained(None, config=fresh.config, state_dict=without)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, tensor in loaded.state_dict().items():
        if "projection" in name:
            assert tensor.std().item() == pytest.approx(fresh.state_dict()[name].std().item(), rel=0.3), name


@every_combination
def test_gradient_checkpointing_changes_nothing(model_class, variant):
    model, input_ids = build(model_class, **VARIANTS[variant]).train(), ids()
    if model.config.reversible:
        with pytest.raises(ValueError, match="reversible layers keep no activations that it could save; drop one"):
            model.gradient_checkpointing_enable()
        return
    results, mask = [], torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])
    for checkpointing in (False, True):
        (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
        assert model.is_gradient_checkpointing is checkpointing
        torch.manual_seed(1)
        loss = loss_of(model, input_ids, attention_mask=mask)
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for plain, checkpointed in zip(*results, strict=True):
        assert_close(checkpointed, plain)


@every_model
def test_the_same_seed_gives_the_same_model_and_the_same_training(model_class):
    def train():
        torch.manual_seed(7)
        model = model_class(config(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss_of(model, ids()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    first, second = train(), train()
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_model
def test_dropout_acts_in_training_only(model_class):
    model, input_ids = build(model_class, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3), ids()
    assert torch.equal(run(model, input_ids), run(model, input_ids))
    model.train()
    assert not torch.equal(run(model, input_ids), run(model, input_ids))


@pytest.mark.parametrize(
    "model_class", [m for m in MODELS if m not in (LinformerModel, LinformerForSequenceClassification)]
)
def test_ignored_labels_have_no_gradient(model_class):
    model, input_ids = build(model_class), ids()
    labels = labels_for(model, input_ids)
    if "start_positions" in labels:  # beyond the input: cut off with it
        alone = model(input_ids[:1], **{name: positions[:1] for name, positions in labels.items()}).loss
        both = model(
            input_ids, **{name: torch.tensor([int(positions[0]), LENGTH + 5]) for name, positions in labels.items()}
        ).loss
        assert_close(both, alone)
        return
    target = labels["labels"]
    some = target.clone()
    some[:, 4:] = -100
    inputs = {}
    if isinstance(model, LinformerForConditionalGeneration):  # both see the same decoder inputs
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(target)
    logits = model(input_ids, labels=some, **inputs).logits
    shift = 1 if isinstance(model, LinformerForCausalLM) else 0
    expected = torch.nn.functional.cross_entropy(logits[:, : 4 - shift].flatten(0, 1), target[:, shift:4].flatten())
    assert_close(model(input_ids, labels=some, **inputs).loss, expected)


@every_model
def test_inputs_embeds_give_the_outputs_of_input_ids(model_class):
    model, input_ids = build(model_class), ids()
    words = model.get_input_embeddings()(input_ids)
    decoder = {"decoder_input_ids": ids()} if model_class is LinformerForConditionalGeneration else {}
    assert torch.equal(run(model, None, inputs_embeds=words, **decoder), run(model, input_ids, **decoder))


@every_model
def test_hidden_states_and_attentions_have_their_shapes(model_class):
    model = build(model_class)
    inputs = labels_for(model, ids()) if model_class is LinformerForConditionalGeneration else {}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        output = model(ids(), output_hidden_states=True, output_attentions=True, **inputs)
        if model_class is LinformerForConditionalGeneration:
            assert [state.shape for state in output.encoder_hidden_states] == [(2, LENGTH, 16)] * 3
            assert [state.shape for state in output.decoder_hidden_states] == [(2, 9, 16)] * 3
            assert [weights.shape for weights in output.encoder_attentions] == [(2, 2, LENGTH, 5)] * 2
            assert [weights.shape for weights in output.cross_attentions] == [(2, 2, 9, 5)] * 2
            assert [weights.shape for weights in output.decoder_attentions] == [(2, 2, 9, 2 * 2 + 9)] * 2
            attentions = (*output.encoder_attentions, *output.cross_attentions, *output.decoder_attentions)
        else:
            rows = LENGTH // 4 * 2 + LENGTH if model_class is LinformerForCausalLM else 5
            assert [state.shape for state in output.hidden_states] == [(2, LENGTH, 16)] * 3
            assert [weights.shape for weights in output.attentions] == [(2, 2, LENGTH, rows)] * 2
            attentions = output.attentions
        for weights in attentions:
            assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))
    assert "attentions" not in model(ids(), **inputs)


@every_model
def test_return_dict_false_gives_a_tuple(model_class):
    model, input_ids = build(model_class), ids()
    labels = labels_for(model, input_ids)
    output = model(input_ids, **labels)
    assert_close(model(input_ids, **labels, return_dict=False)[0], output[0])
    assert isinstance(model(input_ids, **labels, return_dict=False), tuple)


@every_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_can_be_loaded_in_another_dtype(model_class, dtype, tmp_path):
    model, input_ids = build(model_class, spread=0.05), ids()
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])
    model.save_pretrained(tmp_path)
    other = AUTO[model_class].from_pretrained(tmp_path, dtype=dtype).eval()
    assert {parameter.dtype for parameter in other.parameters()} == {dtype}
    exact, answer = run(model, input_ids, attention_mask=mask), run(other, input_ids, attention_mask=mask)
    assert answer.dtype == dtype
    assert (answer.float() - exact).norm() < (1e-5 if dtype == torch.float64 else 0.03) * exact.norm()


@every_combination
def test_on_the_meta_device_a_model_takes_no_memory(model_class, variant):
    with torch.device("meta"):
        model = model_class(config(**VARIANTS[variant]))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.num_parameters() == model_class(config(**VARIANTS[variant])).num_parameters()
    input_ids = torch.zeros(2, LENGTH, dtype=torch.long, device="meta")
    decoder = {"decoder_input_ids": input_ids} if model_class is LinformerForConditionalGeneration else {}
    assert run(model, input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False, **decoder).is_meta


def expected_parameters(model_class, c):
    """The formulas, written out."""
    width, inner, heads = c.hidden_size, c.intermediate_size, c.num_attention_heads
    size = c.head_dim or width // heads
    kv = c.num_key_value_heads or heads

    def linear(inputs, outputs):
        return inputs * outputs + outputs

    def matrices(length, rows, layer_count):
        """Numbers in E and F of all layers; block-causal layers have them over a block."""
        if rows == 0:
            return 0
        per_layer = {"none": 2 * kv, "headwise": 2, "kv": 1, "layerwise": 1}[c.sharing]
        layers = 1 if c.sharing == "layerwise" else layer_count
        one = {"linear": length * rows, "dynamic": width * rows, "conv": -(-length // rows) * width}
        one |= {"affine": length * rows + rows, "head_conv": -(-length // rows) * size**2 + size}
        return layers * per_layer * one.get(c.projection, 0)

    norm, embedding_width = 2 * width, c.embedding_size or width
    is_factorised = embedding_width != width
    attention = linear(width, heads * size) + 2 * linear(width, kv * size) + linear(heads * size, width) + norm
    feed_forward = linear(width, inner) + linear(inner, width) + norm if inner else 0
    positions = c.max_position_embeddings if c.position_embedding == "learned" else 0
    words = c.vocab_size * embedding_width
    local = (c.local_width + 1) * width if c.local_width else 0

    def stack(layers, causal=False, cross=False, types=c.type_vocab_size):
        lengths = c.projected_length if isinstance(c.projected_length, list) else [c.projected_length] * layers
        total = (positions + types) * embedding_width + layers * (attention + feed_forward)
        total += linear(embedding_width, width) if is_factorised else 0
        if c.distance_bias and not causal:
            total += layers * (4 * c.window_length - 1) * heads
        if c.outer_norms:
            total += 2 * embedding_width + (norm if c.norm_first else 0)
        if causal:
            total += 0 if c.decoder_attention == "full" else matrices(c.block_length, c.slots, layers)
        else:
            total += layers * local + sum(
                matrices(c.max_position_embeddings, rows, 1)
                for rows in ([max(lengths)] if c.sharing == "layerwise" else lengths)
            )
        if cross:
            total += layers * attention + matrices(c.max_position_embeddings, lengths[-1], layers)
        return total

    layers = c.num_hidden_layers
    head = linear(width, width) + norm
    back = linear(width, embedding_width) if is_factorised else 0
    masked_lm_head = linear(width, embedding_width) + 2 * embedding_width if c.outer_norms else back
    unless_tied = 0 if c.tie_word_embeddings else words
    return {
        "LinformerModel": lambda: words + stack(layers),
        "LinformerForMaskedLM": lambda: words + stack(layers) + masked_lm_head + unless_tied + c.vocab_size,
        "LinformerForSequenceClassification": lambda: words + stack(layers) + head + linear(width, 3),
        "LinformerForTokenClassification": lambda: words + stack(layers) + linear(width, 3),
        "LinformerForQuestionAnswering": lambda: words + stack(layers) + linear(width, 2),
        "LinformerForCausalLM": lambda: words + stack(layers, causal=True) + back + unless_tied,
        "LinformerForConditionalGeneration": lambda: (
            words
            + stack(layers)
            + stack(c.num_decoder_layers or layers, causal=True, cross=True, types=0)
            + back
            + 2 * unless_tied
        ),
    }[model_class.__name__]()


@pytest.mark.parametrize(("model_class", "variant"), pairs(MODELS))
def test_parameters_are_as_many_as_the_formulas_say(model_class, variant):
    if variant == "K per layer" and model_class is LinformerForConditionalGeneration:
        changes = {"projected_length": [6, 3], "num_decoder_layers": 3}
    else:
        changes = VARIANTS[variant]
    model = model_class(config(**changes))
    counted = sum({id(parameter): parameter.numel() for parameter in model.parameters()}.values())
    assert model.num_parameters() == counted == expected_parameters(model_class, config(**changes))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("model_class", "variant"), pairs([LinformerForCausalLM, LinformerForConditionalGeneration]))
def test_logits_and_gradients_are_those_of_the_equations(model_class, variant):
    model, source, target = build(model_class, **VARIANTS[variant]), ids(), ids(2, 9)
    if model_class is LinformerForCausalLM:
        logits = model(torch.cat([source, target], dim=1)).logits[:, LENGTH:]
    else:
        logits = model(source, decoder_input_ids=target).logits
    expected = plain_logits(model, source, target)
    assert_close(logits, expected)
    upstream, parameters = torch.randn_like(logits), list(model.parameters())
    assert_close(*(torch.autograd.grad(one, parameters, upstream) for one in (logits, expected)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("embedding_size", [None, 16, 6, 20])
@pytest.mark.parametrize("outer_norms", [True, False])
def test_a_masked_lm_maps_hidden_states_to_the_width_of_its_embeddings(embedding_size, outer_norms, tmp_path):
    changes = {"embedding_size": embedding_size, "outer_norms": outer_norms}
    model, input_ids = build(LinformerForMaskedLM, **changes), ids()
    hidden = plain_hidden_states(model.model, input_ids)
    if outer_norms:
        hidden = model.head.norm(functional.gelu(model.head.dense(hidden)))
    elif embedding_size not in (None, 16):
        hidden = hidden @ model.head.weight.mT + model.head.bias
    words = model.model.embeddings.word_embeddings.weight
    assert words.shape == (VOCABULARY, embedding_size or 16)
    assert model.lm_head.weight is words
    assert_close(model(input_ids).logits, hidden @ words.mT + model.lm_head.bias)
    if embedding_size == 16:
        assert model.state_dict().keys() == build(LinformerForMaskedLM, outer_norms=outer_norms).state_dict().keys()
    model.resize_token_embeddings(VOCABULARY + 7)
    model.save_pretrained(tmp_path)
    loaded = LinformerForMaskedLM.from_pretrained(tmp_path).eval()
    assert_close(loaded(input_ids).logits, model(input_ids).logits)


def bert_weights(bert):
    """Names of BertModel to ours."""
    renamed = {}
    for name, tensor in bert.state_dict().items():
        for theirs, ours in [
            ("embeddings.LayerNorm", "embeddings.norm"),
            ("encoder.layer.", "layers."),
            ("attention.self.", "attention."),
            ("attention.output.dense", "attention.output"),
            ("attention.output.LayerNorm", "attention_residual.norm"),
            ("intermediate.dense", "feed_forward.inner"),
            ("output.dense", "feed_forward.outer"),
            ("output.LayerNorm", "feed_forward_residual.norm"),
        ]:
            if not (theirs.startswith("output") and ".attention." in name):
                name = name.replace(theirs, ours)
        renamed[name] = tensor
    return renamed


def test_without_a_projection_and_with_its_weights_the_encoder_is_bert():
    sizes = {
        "vocab_size": 60,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "max_position_embeddings": 40,
    }
    bert = BertModel(BertConfig(**sizes), add_pooling_layer=False).eval()
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    ours = LinformerModel(config(**sizes, projection="none", norm_first=False)).eval()
    ours.load_state_dict(bert_weights(bert), strict=True)
    input_ids, types = torch.randint(60, (3, 40)), torch.randint(2, (3, 40))
    mask = torch.arange(40) < torch.tensor([[40], [25], [1]])
    theirs = bert(input_ids, token_type_ids=types, attention_mask=mask.long(), output_hidden_states=True)
    answer = ours(input_ids, token_type_ids=types, attention_mask=mask.long(), output_hidden_states=True)
    for expected, state in zip(theirs.hidden_states, answer.hidden_states, strict=True):
        assert_close(state[mask], expected[mask], rtol=1e-4, atol=1e-5)
    assert_close(ours(input_ids).last_hidden_state, bert(input_ids).last_hidden_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("depth", [2, 24])
@every_model
def test_a_new_model_has_outputs_and_gradients_of_normal_size(model_class, depth, norm_first):
    """Logits of a model that knows nothing are small, and no layer's gradient vanishes or explodes."""
    model = model_class(
        config(
            hidden_size=64, num_attention_heads=4, intermediate_size=256, num_hidden_layers=depth, norm_first=norm_first
        )
    )
    input_ids = ids(4)
    if model_class is not LinformerModel:
        assert run(model, input_ids).std() < 1
        if model_class in (LinformerForMaskedLM, LinformerForCausalLM, LinformerForConditionalGeneration):
            expected = torch.tensor(float(VOCABULARY)).log()
            assert (loss_of(model, input_ids) - expected).abs() < 0.5
    loss_of(model, input_ids).backward()
    stack = model if model_class is LinformerModel else getattr(model, "decoder", None) or model.model
    norms = torch.stack([layer.feed_forward.outer.weight.grad.norm() for layer in stack.layers])
    if model_class is not LinformerModel:  # whose stand-in for a loss has almost no gradient behind the last norm
        assert norms.min() > 1e-5
        assert norms.max() < 10
    assert norms.max() / norms.min() < 100


def test_initialization_is_that_of_bert_and_of_segment_means():
    model = LinformerForMaskedLM(
        config(hidden_size=128, num_attention_heads=4, intermediate_size=512, initializer_range=0.05)
    )
    layer = model.model.layers[0]
    for linear in (layer.attention.query, layer.attention.output, layer.feed_forward.inner, model.head.dense):
        assert linear.weight.std().item() == pytest.approx(0.05, rel=0.05)
        assert not linear.bias.any()
    assert model.model.embeddings.word_embeddings.weight[1:].std().item() == pytest.approx(0.05, rel=0.05)
    assert not model.model.embeddings.word_embeddings.weight[0].any()  # padding
    columns = layer.attention.projection.weight.sum(dim=0)
    assert_close(columns, torch.ones_like(columns), atol=0.3, rtol=0)  # means
    sinusoidal = LinformerModel(config(hidden_size=128, num_attention_heads=4, position_embedding="sinusoidal"))
    waves = sinusoidal.embeddings.position_embeddings(torch.arange(1000)[None])
    assert waves.std().item() == pytest.approx(0.02, rel=0.2)  # as large as words
    assert_close((waves[0, 0, 0::2], waves[0, 0, 1::2]), (torch.zeros(64), torch.full((64,), 0.02 * 2**0.5)))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_class", [LinformerForMaskedLM, LinformerForCausalLM, LinformerForConditionalGeneration])
def test_word_embeddings_are_tied_or_not_and_can_be_resized(model_class, tied, tmp_path):
    model, input_ids = build(model_class, tie_word_embeddings=tied), ids()
    pointers = {
        tensor.data_ptr()
        for name, tensor in model.state_dict().items()
        if "word_emb" in name or name == "lm_head.weight"
    }
    count = 3 if model_class is LinformerForConditionalGeneration else 2
    assert len(pointers) == (1 if tied else count)
    before = run(model, input_ids)
    model.resize_token_embeddings(VOCABULARY + 7)
    assert_close(run(model, input_ids)[..., :VOCABULARY], before)
    new = torch.full((1, 5), VOCABULARY + 6)
    assert model(new, labels=new).logits.shape == (1, 5, VOCABULARY + 7)
    model.save_pretrained(tmp_path)
    loaded = AUTO[model_class].from_pretrained(tmp_path).eval()
    assert loaded.config.vocab_size == VOCABULARY + 7
    assert torch.equal(run(loaded, input_ids), run(model, input_ids))
    model.resize_token_embeddings(VOCABULARY - 5)
    assert run(model, ids().clamp(max=VOCABULARY - 6)).shape[-1] == VOCABULARY - 5


@every_combination
def test_positions_and_projections_can_be_resized(model_class, variant, tmp_path):
    model, input_ids = build(model_class, **VARIANTS[variant]), ids()
    kept = VARIANTS[variant].get("projection") not in ("conv", "head_conv") and variant not in ("rescale", "window")
    kept = kept or model_class is LinformerForCausalLM  # whose blocks do not change
    before = run(model, input_ids)
    for length in (75, 32, LENGTH):  # longer, back, shorter: what it could read before it reads as before
        model.resize_position_embeddings(length)
        assert model.config.max_position_embeddings == length
        after = run(model, input_ids)
        if kept:
            assert_close(after, before, rtol=1e-4, atol=1e-5)
        assert after.isfinite().all()
        assert run(model, ids(1, length)).isfinite().all()
        model.save_pretrained(tmp_path / str(length))
        loaded = AUTO[model_class].from_pretrained(tmp_path / str(length)).eval()
        assert torch.equal(run(loaded, input_ids), after)
    loss_of(model, input_ids).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_new_positions_repeat_the_old_ones_from_the_first():
    model, whole = build(LinformerModel), ids(2, 32)
    positions, E = (
        model.embeddings.position_embeddings.weight.clone(),
        model.layers[0].attention.projection.weight.clone(),
    )
    before = run(model, whole)
    model.resize_position_embeddings(75)
    assert_close(run(model, whole), before, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.embeddings.position_embeddings.weight, positions.repeat(3, 1)[:75])
    assert torch.equal(model.layers[0].attention.projection.weight, E.repeat(3, 1, 1)[:75])


def test_a_checkpoint_can_contain_the_code(tmp_path):
    """Loaded where the package is not installed, from nothing but the directory."""
    script = """
        import os, sys
        sys.modules["linformer_kit"] = None  # as if it were not installed
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, modeling_layers
        for name, auto in {"masked": AutoModelForMaskedLM, "seq2seq": AutoModelForSeq2SeqLM}.items():
            if pid := os.fork():  # so that each starts without the code of the other
                assert os.waitpid(pid, 0)[1] == 0, name
                continue
            model = auto.from_pretrained(f"{sys.argv[1]}/{name}", trust_remote_code=True).eval()
            assert "transformers_modules" in type(model).__module__
            kwargs = {"decoder_input_ids": torch.arange(9)[None] * 5 % 47 + 3} if name == "seq2seq" else {}
            logits = model(torch.arange(3, 24)[None], **kwargs).logits
            save_file({"logits": logits}, f"{sys.argv[1]}/{name}.safetensors")
            break
    """
    expected = {}
    for name, model_class in {"masked": LinformerForMaskedLM, "seq2seq": LinformerForConditionalGeneration}.items():
        folder, model = tmp_path / name, build(model_class, sharing="layerwise")
        original = copy.copy(model_class._auto_class), copy.copy(type(model.config)._auto_class)
        try:
            model_class.register_for_auto_class(AUTO[model_class].__name__)
            type(model.config).register_for_auto_class()
            model.save_pretrained(folder)
        finally:
            model_class._auto_class, type(model.config)._auto_class = original
        assert (folder / "projection_linformer.py").exists()
        expected[name] = run(model, torch.arange(3, 24)[None])
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for name, logits in expected.items():
        assert_close(load_file(tmp_path / f"{name}.safetensors")["logits"], logits)


# forks of a process that has imported what transformers imports, which takes seconds, but not transformers
IMPORT_ORDERS = """
import os, sys, torch, torch._dynamo, torch.distributed.tensor, torch.onnx.ops, scipy.optimize
assert not {"transformers", "linformer_kit"} & set(sys.modules)
for first in sys.argv[1:]:
    if pid := os.fork():
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"after {first!r}")
        continue
    exec(first)
    from transformers import AutoConfig, AutoModel
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    model = AutoModel.from_config(AutoConfig.for_model("linformer", **sizes))
    os._exit(type(model).__name__ != "LinformerModel")
"""


def test_auto_classes_are_registered_in_any_import_order():
    orders = [
        "import linformer_kit, transformers",
        "import transformers, linformer_kit",
        "from linformer_kit import LinformerModel",
        "import linformer_kit, importlib.util; importlib.util.find_spec('transformers')",
        "import linformer_kit.models.modeling_linformer_seq2seq",
        "import linformer_kit.models.configuration_linformer",
        "import linformer_kit; from transformers import BertModel",
    ]
    ran = subprocess.run([sys.executable, "-c", IMPORT_ORDERS, *orders], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_configuration_survives_its_file_and_keeps_what_others_stored(tmp_path, caplog):
    saved = config(projected_length=[7, 3], id2label={0: "bad", 1: "good", 2: "fair"}, architectures=["LinformerModel"])
    saved.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.to_diff_dict() == saved.to_diff_dict()
    assert loaded.id2label[1] == "good"
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text()) | {
        "torch_dtype": "float32",
        "_name_or_path": "x",
        "temperature": 0.5,
        "key_of_2030": 1,
    }
    path.write_text(json.dumps(stored))
    assert AutoConfig.from_pretrained(tmp_path).key_of_2030 == 1
    for name in ("mask_token_id", "sep_token_id", "cls_token_id", "torchscript", "unsloth_version", "layer_types"):
        path.write_text(json.dumps(stored | {name: None}))
        AutoConfig.from_pretrained(tmp_path)
    path.write_text(json.dumps(stored | {"projected_lenght": 4}))
    with pytest.raises(TypeError, match="no field 'projected_lenght'; did you mean 'projected_length'"):
        AutoConfig.from_pretrained(tmp_path)


def test_classification_supports_one_class_several_classes_and_regression():
    model, input_ids = build(LinformerForSequenceClassification), ids()
    logits = run(model, input_ids)
    one = torch.tensor([2, 0])
    assert_close(model(input_ids, labels=one).loss, torch.nn.functional.cross_entropy(logits, one))
    assert model.config.problem_type == "single_label_classification"
    several = torch.tensor([[1, 0, 1], [0, 0, 1]])
    for labels in (several, several.float(), several.bool()):
        model.config.problem_type = None
        expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, several.float())
        assert_close(model(input_ids, labels=labels).loss, expected)
        assert model.config.problem_type == "multi_label_classification"
    number = build(LinformerForSequenceClassification, num_labels=1)
    for labels in (torch.tensor([0.5, -2.0]), torch.tensor([[3], [4]])):
        expected = (run(number, input_ids)[:, 0] - labels.flatten()).square().mean()
        assert_close(number(input_ids, labels=labels).loss, expected)
    both = build(LinformerForSequenceClassification, problem_type="regression")
    assert_close(both(input_ids, labels=several).loss, (run(both, input_ids) - several).square().mean())


def test_pooling_takes_the_mean_or_the_first_of_the_real_tokens():
    for pooling in ("mean", "first"):
        model = build(LinformerForSequenceClassification, classifier_pooling=pooling)
        input_ids, mask = ids(), torch.arange(LENGTH) >= torch.tensor([[0], [9]])
        hidden = model.model(input_ids, attention_mask=mask).last_hidden_state
        pooled = torch.stack(
            [
                row[real].mean(dim=0) if pooling == "mean" else row[real][0]
                for row, real in zip(hidden, mask, strict=True)
            ]
        )
        assert_close(run(model, input_ids, attention_mask=mask), model.classifier(model.head(pooled)))


@every_model
def test_a_subclass_of_another_name_has_the_same_loss(model_class):
    model, input_ids = build(model_class), ids()
    labels = labels_for(model, input_ids)
    renamed = type("Mine", (model_class,), {})(model.config).eval()
    renamed.load_state_dict(model.state_dict())
    if labels:
        assert_close(renamed(input_ids, **labels).loss, model(input_ids, **labels).loss)


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification", "regression"])
def test_the_loss_of_several_batches_is_that_of_one(problem):
    """As transformers accumulates gradients: each batch says its part of all that is to be predicted."""
    model, input_ids = build(LinformerForSequenceClassification, problem_type=problem), ids(8)
    labels = torch.randint(3, (8,)) if problem.startswith("single") else torch.randint(2, (8, 3))
    parts = zip(input_ids.split(2), labels.split(2), strict=True)
    loss = sum(model(part, labels=some, num_items_in_batch=labels.numel()).loss for part, some in parts)
    assert_close(loss, model(input_ids, labels=labels).loss)


def test_the_local_convolution_equals_the_sum_over_neighbors():
    """Against the sum written out in float64; an encoder has it on both sides, a decoder has none."""
    model = build(LinformerModel, local_width=5).double()
    layer, x_BNC = model.layers[1], torch.randn(2, LENGTH, 16, dtype=torch.double)
    local, normed_BNC = layer.local, layer.attention_residual.norm(x_BNC)
    expected = torch.zeros_like(x_BNC) + local.bias
    for offset in range(-2, 3):
        for token in range(max(0, -offset), min(LENGTH, LENGTH - offset)):
            expected[:, token] += local.weight[:, 0, offset + 2] * normed_BNC[:, token + offset]
    assert_close(local(normed_BNC, None), expected)
    attended_BNC = x_BNC + layer.attention(normed_BNC) + expected
    fed_forward_BNC = layer.feed_forward(layer.feed_forward_residual.norm(attended_BNC))
    assert_close(layer(x_BNC, None, None)[0], attended_BNC + fed_forward_BNC)
    assert LinformerForCausalLM(config(local_width=5)).model.layers[0].local is None
    both = LinformerForConditionalGeneration(config(local_width=5))
    assert (both.encoder.layers[0].local is None, both.decoder.layers[0].local is None) == (False, True)


def test_a_masked_lm_computes_only_the_requested_logits():
    model, input_ids = build(LinformerForMaskedLM), ids()
    kept = torch.rand(input_ids.shape) < 0.3
    labels = input_ids.masked_fill(~kept, -100)
    whole, some = model(input_ids, labels=labels), model(input_ids, labels=labels, logits_to_keep=kept)
    assert some.logits.shape == (int(kept.sum()), VOCABULARY)
    assert_close(some.logits, whole.logits[kept])
    assert_close(some.loss, whole.loss)


def test_labels_need_not_be_contiguous():
    input_ids = ids(2, LENGTH + 3)[:, :LENGTH]
    for model_class in (LinformerForMaskedLM, LinformerForCausalLM, LinformerForConditionalGeneration):
        assert model_class(config())(input_ids, labels=input_ids).loss.isfinite()
    assert LinformerForTokenClassification(config())(input_ids, labels=input_ids % 3).loss.isfinite()


def test_float_masks_of_zeros_and_ones_are_accepted():
    model, input_ids = build(LinformerModel), ids()
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])
    assert torch.equal(run(model, input_ids, attention_mask=mask.float()), run(model, input_ids, attention_mask=mask))


def test_the_encoder_of_a_resized_translator_can_be_saved_by_itself(tmp_path):
    for tied in (True, False):
        model = build(LinformerForConditionalGeneration, tie_word_embeddings=tied)
        model.resize_token_embeddings(VOCABULARY + 10, pad_to_multiple_of=8)
        model.get_encoder().save_pretrained(tmp_path)
        assert AutoModel.from_pretrained(tmp_path).config.vocab_size == 64


def test_generation_uses_the_configuration_of_the_model():
    model = build(LinformerForConditionalGeneration)
    model.set_attn_implementation("eager")
    model.config.use_cache, model.config.output_attentions, model.config.output_hidden_states = False, True, True
    output = model(ids(), decoder_input_ids=ids())
    assert output.past_key_values is None
    assert len(output.cross_attentions) == len(output.encoder_attentions) == 2
    assert len(output.decoder_hidden_states) == len(output.encoder_hidden_states) == 3


class Packed(torch.nn.Linear):
    """Weights stored as bytes, as quantized ones are."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features)
        self.bias = linear.bias
        self.real = linear.weight.data
        self.weight = torch.nn.Parameter(torch.zeros_like(linear.weight, dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.real, self.bias)


@every_variant
def test_replaced_linear_layers_are_called_and_not_bypassed(variant):
    for model_class in (LinformerModel, LinformerForCausalLM) if variant in CAUSAL_VARIANTS else (LinformerModel,):
        model = build(model_class, **VARIANTS[variant])
        packed = copy.deepcopy(model)
        for module in [*packed.modules()]:
            for name, child in module.named_children():
                if type(child) is torch.nn.Linear and name != "lm_head":
                    setattr(module, name, Packed(child))
        for input_ids in (ids(), ids(30)):  # also more rows than are computed at once
            with torch.no_grad():
                assert_close(run(packed, input_ids), run(model, input_ids))


@every_model
@pytest.mark.parametrize("variant", ["default", "layerwise", "dynamic", "per head"])
def test_offloaded_weights_are_loaded_when_they_are_used(model_class, variant):
    model = build(model_class, **VARIANTS[variant])
    batches = (ids(), ids(30))
    with torch.no_grad():
        expected = [run(model, input_ids) for input_ids in batches]
        offloaded = accelerate.cpu_offload(copy.deepcopy(model))
        for input_ids, answer in zip(batches, expected, strict=True):
            assert_close(run(offloaded, input_ids), answer, rtol=1e-4, atol=1e-5)


@given(
    length=st.integers(1, 32),
    projected_length=st.integers(1, 40),
    heads=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 3),
)
def test_any_combination_of_sizes_works(length, projected_length, heads, layers):
    changes = {"projected_length": projected_length, "num_attention_heads": heads, "num_hidden_layers": layers}
    model = LinformerForTokenClassification(config(**changes))
    assert run(model, ids(2, length)).shape == (2, length, 3)


def test_the_configuration_passed_in_is_not_modified():
    passed = config()
    before = passed.to_dict()
    for model_class in MODELS:
        model_class(passed)
        assert passed.to_dict() == before
