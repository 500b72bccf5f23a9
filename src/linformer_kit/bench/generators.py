"""Models that generate: encoder-decoders and causal LMs, filling a cache and decoding from it, and their checks.

Shapes: B batch, N length, T length of the target, V vocabulary.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import Seq2SeqLMOutput

from ..models.cache_linformer import LinformerCache
from ..models.configuration_linformer import LinformerConfig
from ..models.modeling_linformer import LinformerForCausalLM
from ..models.modeling_linformer_seq2seq import LinformerForConditionalGeneration
from .checks import TOLERANCE, WrongImplementation, plain_logits, require_agreement
from .encoders import NO_DROPOUT, VOCABULARY, config_options, random_ids
from .point import CHECKED_LENGTH, Point
from .workload import Build, Workload, torch_workload

LED_WINDOW = 256
BEGIN = 1  # the first token of every target
SETTINGS = {**NO_DROPOUT, "position_embedding": "sinusoidal", "bos_token_id": BEGIN}


def our_encoder_decoder(point: Point) -> nn.Module:
    config = LinformerConfig(**config_options(point), **SETTINGS, **point.projection_options)
    return LinformerForConditionalGeneration(config).eval()


def our_causal_lm(point: Point) -> nn.Module:
    options = {"decoder_attention": "full"} if point.projected_length is None else point.projection_options
    return LinformerForCausalLM(LinformerConfig(**config_options(point), **SETTINGS, **options)).eval()


def led(point: Point) -> nn.Module:
    parts = ("encoder", "decoder")
    config = transformers.LEDConfig(
        vocab_size=VOCABULARY,
        d_model=point.hidden_size,
        **{f"{part}_layers": point.num_layers for part in parts},
        **{f"{part}_attention_heads": point.num_heads for part in parts},
        **{f"{part}_ffn_dim": 4 * point.hidden_size for part in parts},
        max_encoder_position_embeddings=-(-point.length // LED_WINDOW) * LED_WINDOW,  # LED pads to whole windows
        max_decoder_position_embeddings=point.target_length + 2,
        attention_window=LED_WINDOW,
        dropout=0.0,
    )
    return transformers.LEDForConditionalGeneration(config)


def long_t5(point: Point) -> nn.Module:
    config = transformers.LongT5Config(
        vocab_size=VOCABULARY,
        d_model=point.hidden_size,
        d_kv=point.head_size,
        d_ff=4 * point.hidden_size,
        num_layers=point.num_layers,
        num_heads=point.num_heads,
        encoder_attention_type="transient-global",
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.LongT5ForConditionalGeneration(config)


class LinformerPytorchEncoderDecoder(nn.Module):
    """`LinformerEncDec` of `linformer-pytorch`; source and target must have the same length."""

    def __init__(self, point: Point):
        super().__init__()
        from linformer_pytorch import LinformerEncDec

        options: dict[str, Any] = {
            "dim_k": point.projected_length,
            "dim_ff": 4 * point.hidden_size,
            "nhead": point.num_heads,
        }
        options |= {"depth": point.num_layers, "dropout": 0.0, "dropout_ff": 0.0}
        both = {f"{part}_{name}": value for part in ("enc", "dec") for name, value in options.items()}
        self.model = LinformerEncDec(*(2 * (VOCABULARY, point.length, point.hidden_size)), **both)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Seq2SeqLMOutput:
        return Seq2SeqLMOutput(logits=self.model(input_ids, decoder_input_ids))


# prefill and decoding


@dataclass(frozen=True)
class DecodingState:
    """The cache after prefill, the next token, and other inputs of each call."""

    cache: LinformerCache
    token_B1: Tensor
    inputs: dict[str, Any] = field(default_factory=dict)


def is_causal_lm(model: nn.Module) -> bool:
    return isinstance(model, LinformerForCausalLM)


@torch.no_grad()
def prefill(model: Any, ids_BN: Tensor) -> DecodingState:
    """Process a prompt, or encode a source and start the target; the cache then holds the rows of cross-attention."""
    if is_causal_lm(model):
        output, inputs = model(ids_BN, use_cache=True, logits_to_keep=1), {}
    else:
        inputs = {"encoder_outputs": model.encoder(ids_BN)}
        output = model(decoder_input_ids=ids_BN.new_full((ids_BN.shape[0], 1), BEGIN), use_cache=True, **inputs)
    return DecodingState(output.past_key_values, most_likely(output.logits), inputs)


@torch.no_grad()
def decode(model: Any, state: DecodingState, tokens: int) -> LinformerCache:
    """Generate this many tokens greedily and return the cache; `state` is not changed."""
    cache, token_B1 = copy_cache(state.cache), state.token_B1
    for _ in range(tokens):
        token_B1 = most_likely(next_logits(model, state, cache, token_B1))
    return cache


def next_logits(model: Any, state: DecodingState, cache: LinformerCache, token_B1: Tensor) -> Tensor:
    """The logits (B, 1, V) after one more token, which is added to the cache."""
    name = "input_ids" if is_causal_lm(model) else "decoder_input_ids"
    return model(**{name: token_B1}, past_key_values=cache, use_cache=True, **state.inputs).logits


def most_likely(logits_BNV: Tensor) -> Tensor:
    return logits_BNV[:, -1:].argmax(dim=-1)


def copy_cache(cache: LinformerCache) -> LinformerCache:
    """A cache that can grow independently; tensors are shared, because layers replace and never modify them."""
    new = copy.copy(cache)
    new.layers = [copy.copy(layer) for layer in cache.layers]
    return new


# check and call


def check_generator(point: Point, build: Build) -> None:
    """Check causality; compare our models with the plain form in float64, with and without the cache."""
    model: Any = build(point.small()).eval()
    ids_BN, target_BT = random_ids(2, CHECKED_LENGTH), random_ids(2, CHECKED_LENGTH)
    if not is_causal_lm(model):
        require_causality(point.implementation, model, ids_BN, target_BT)
    if not isinstance(model, LinformerForCausalLM | LinformerForConditionalGeneration):
        return
    # a block and a half, so that one block is finished
    long_BT = random_ids(2, model.config.block_length * 3 // 2)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        inputs = {"input_ids": ids_BN, "decoder_input_ids": long_BT}
        if is_causal_lm(model):
            inputs = {"input_ids": torch.cat([ids_BN, long_BT], dim=1)}
        logits_BTV = model(**inputs).logits[:, -long_BT.shape[1] :]
        require_agreement(point.implementation, "logits", logits_BTV, plain_logits(exact, ids_BN, long_BT))
        check_cache(point.implementation, model, exact, ids_BN, long_BT[:, : model.config.block_length + 4])


@torch.no_grad()
def check_cache(name: str, model: Any, exact: Any, ids_BN: Tensor, new_BT: Tensor) -> None:
    """Compare logits computed token by token from the cache with the plain form of one pass over all tokens."""
    state = prefill(model, ids_BN)
    decode(model, state, new_BT.shape[1])  # must not change the state
    cache = copy_cache(state.cache)
    logits_BTV = torch.cat([next_logits(model, state, cache, token_B1) for token_B1 in new_BT.split(1, dim=1)], dim=1)
    target_BT = new_BT if is_causal_lm(model) else torch.cat([torch.full_like(new_BT[:, :1], BEGIN), new_BT], dim=1)
    expected_BTV = plain_logits(exact, ids_BN, target_BT)[:, -new_BT.shape[1] :]
    require_agreement(name, "logits from the cache", logits_BTV, expected_BTV)


@torch.no_grad()
def require_causality(name: str, model: Any, ids_BN: Tensor, target_BT: Tensor) -> None:
    logits_BTV = model(input_ids=ids_BN, decoder_input_ids=target_BT).logits
    changed_BT = torch.cat([target_BT[:, :-1], target_BT[:, -1:] - 1], dim=1)
    changed_BTV = model(input_ids=ids_BN, decoder_input_ids=changed_BT).logits
    change = float((logits_BTV - changed_BTV)[:, :-1].abs().max() / logits_BTV.square().mean().sqrt())
    if not change <= TOLERANCE:
        raise WrongImplementation(
            f"{name}: another last token of the target changes earlier logits by a relative {change:.1e}; "
            "it sees the future, so it was not timed"
        )


def inputs_of(model: nn.Module, ids_BN: Tensor, target_BT: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids_BN} if is_causal_lm(model) else {"input_ids": ids_BN, "decoder_input_ids": target_BT}


@torch.no_grad()
def output(point: Point, model: nn.Module) -> Tensor:
    """The logits of random ids."""
    ids_BN, target_BT = (random_ids(2, length).to(point.device) for length in (point.length, point.target_length))
    return model(**inputs_of(model, ids_BN, target_BT)).logits


def generator_workload(point: Point, build: Build) -> Workload:
    """A forward pass, a training step without the optimizer, `generate`, filling a cache, or decoding from it."""
    model: Any = build(point)
    ids_BN = random_ids(point.batch, point.length).to(point.device)
    target_BT = random_ids(point.batch, point.target_length).to(point.device)
    inputs = inputs_of(model, ids_BN, target_BT)

    def training() -> None:
        model(input_ids=ids_BN, labels=ids_BN if is_causal_lm(model) else target_BT).loss.backward()
        model.zero_grad(set_to_none=True)

    def generation() -> object:
        # an encoder-decoder adds the first token itself
        tokens = point.target_length - (0 if is_causal_lm(model) else 1)
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        return model.generate(ids_BN, attention_mask=torch.ones_like(ids_BN), **options)

    if point.step == "decoding":
        call = partial(decode, model, prefill(model, ids_BN), point.target_length)
        return torch_workload(point, model, call, cache_bytes=call().nbytes)
    calls: dict[str, Callable[[], object]] = {
        "forward": torch.no_grad()(lambda: model(**inputs).logits),
        "training": training,
        "generation": generation,
        "prefill": partial(prefill, model, ids_BN),
    }
    return torch_workload(point, model, calls[point.step])
