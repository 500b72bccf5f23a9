"""Generation in two phases: reading the prompt or the source, and one token after another from the cache.

Shapes: B batch, N length.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..models.cache_linformer import LinformerCache
from ..models.configuration_linformer import LinformerConfig
from ..models.modeling_linformer import LinformerForCausalLM
from ..models.modeling_linformer_seq2seq import LinformerForConditionalGeneration
from .peer_models import NO_DROPOUT, Sizes
from .peers import require_agreement

Generator = LinformerForCausalLM | LinformerForConditionalGeneration
BEGIN = 1  # the token that every target begins with
SETTINGS = {**NO_DROPOUT, "position_embedding": "sinusoidal", "bos_token_id": BEGIN}


@dataclass(frozen=True)
class Started:
    """Where generation goes on: the cache, the next token, and what else each call needs."""

    cache: LinformerCache
    token_B1: Tensor
    given: dict[str, Any] = field(default_factory=dict)


def causal_lm(sizes: Sizes, length: int, **options: Any) -> LinformerForCausalLM:
    """A decoder that reads and continues prompts."""
    return LinformerForCausalLM(LinformerConfig(**sizes.of_config(length), **SETTINGS, **options)).eval()


def encoder_decoder(sizes: Sizes, length: int, **options: Any) -> LinformerForConditionalGeneration:
    """An encoder that reads sources up to this length, and a decoder over it."""
    return LinformerForConditionalGeneration(LinformerConfig(**sizes.of_config(length), **SETTINGS, **options)).eval()


@torch.no_grad()
def read(model: Generator, ids_BN: Tensor) -> Started:
    """Read a prompt; or encode a source, and start the target: its rows for cross-attention are then in the cache."""
    if isinstance(model, LinformerForCausalLM):
        output, given = model(ids_BN, use_cache=True, logits_to_keep=1), {}
    else:
        given = {"encoder_outputs": model.encoder(ids_BN)}
        output = model(decoder_input_ids=ids_BN.new_full((ids_BN.shape[0], 1), BEGIN), use_cache=True, **given)
    return Started(output.past_key_values, most_likely(output.logits), given)


@torch.no_grad()
def go_on(model: Generator, started: Started, tokens: int) -> LinformerCache:
    """Generate so many tokens, the most likely each time; gives the cache behind them. `started` stays as it is."""
    cache, token_B1 = copied(started.cache), started.token_B1
    for _ in range(tokens):
        token_B1 = most_likely(logits_after(model, started, cache, token_B1))
    return cache


def logits_after(model: Generator, started: Started, cache: LinformerCache, token_B1: Tensor) -> Tensor:
    """The logits (B, 1, V) of what follows one more token, which the cache takes in."""
    name = "input_ids" if isinstance(model, LinformerForCausalLM) else "decoder_input_ids"
    return model(**{name: token_B1}, past_key_values=cache, use_cache=True, **started.given).logits


def most_likely(logits_BNV: Tensor) -> Tensor:
    return logits_BNV[:, -1:].argmax(dim=-1)


def copied(cache: LinformerCache) -> LinformerCache:
    """A cache that can go on without the first one; tensors are not copied, since layers replace and never change them."""
    new = copy.copy(cache)
    new.layers = [copy.copy(layer) for layer in cache.layers]
    return new


@torch.no_grad()
def check_generator(name: str, model: Generator, ids_BN: Tensor, new_BT: Tensor) -> None:
    """Raise `WrongImplementation` unless logits from the cache, token by token, are those of a float64 pass over everything."""
    started = read(model, ids_BN)
    go_on(model, started, new_BT.shape[1])  # must leave no trace in what comes after
    cache = copied(started.cache)
    logits_BTV = torch.cat(
        [logits_after(model, started, cache, token_B1) for token_B1 in new_BT.split(1, dim=1)], dim=1
    )
    exact = copy.deepcopy(model).double()
    if isinstance(exact, LinformerForCausalLM):
        output = exact(torch.cat([ids_BN, new_BT], dim=1), use_cache=False)
    else:
        target_BT = torch.cat([new_BT.new_full((new_BT.shape[0], 1), BEGIN), new_BT], dim=1)
        output = exact(ids_BN, decoder_input_ids=target_BT, use_cache=False)
    require_agreement(name, "logits", logits_BTV, output.logits[:, -new_BT.shape[1] :])
