"""The cache of the decoders, in the form that `generate` expects."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import MappingKey, register_pytree_node
from transformers.cache_utils import Cache, CacheLayerMixin

from .attention_linformer import KeysValues
from .causal_linformer import CausalCache, CausalLinformerAttention
from .configuration_linformer import LinformerConfig
from .validation_linformer import has_values


class LinformerCacheLayer(CacheLayerMixin):
    """The cache of one decoder layer: summaries and open block of its tokens, and K projected rows of the source."""

    supports_early_init = False

    def __init__(self, max_length: int):
        super().__init__()
        self.max_length = max_length  # in exported graphs, the cache has room for so many tokens
        self.reset()

    def reset(self) -> None:
        self.past: CausalCache | None = None
        self.source: KeysValues | None = None
        self.tokens: int | Tensor = 0  # number of columns so far, including padding; a tensor () in exported graphs

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        source = () if self.source is None else (tensor for tensor in self.source if tensor is not None)
        return (0 if self.past is None else self.past.nbytes) + sum(tensor.nbytes for tensor in source)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select examples of the batch; an index may occur several times."""
        if self.past is not None:
            self.past = self.past.reorder(indices)
        if self.source is not None:
            self.source = self.source.reorder(indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.past is not None:
            batch = self.past.open.x_BPC
            self.batch_select_indices(torch.arange(batch.shape[0], device=batch.device).repeat_interleave(repeats))

    def advance(
        self, attention: CausalLinformerAttention, x_BTC: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Output and weights of the new tokens `x_BTC`; see `CausalLinformerAttention.advance` for the options."""
        # a graph serves every position, so that no shape and no number in it may depend on the position
        max_length = self.max_length if torch.compiler.is_exporting() else None
        if max_length is not None and x_BTC.shape[1] > max_length:
            raise ValueError(
                f"input has {x_BTC.shape[1]} tokens but the cache of an exported model has room for "
                f"max_position_embeddings = {max_length}; export shorter inputs, or with use_cache=False"
            )
        output, weights, self.past = attention.advance(x_BTC, self.past, max_length=max_length, **options)
        self.tokens = self.tokens + x_BTC.shape[1]
        if max_length is not None and not isinstance(self.tokens, Tensor):
            self.tokens = torch.full((), self.tokens, dtype=torch.long, device=x_BTC.device)
        return output, weights

    def get_seq_length(self) -> int:
        is_number = isinstance(self.tokens, Tensor) and has_values(self.tokens)
        return int(self.tokens) if is_number else self.tokens  # type: ignore[return-value]

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError(
                "tokens cannot be removed from the summaries of finished blocks; start with a new cache"
            )

    def lazy_initialization(self, *_: Any) -> None:
        raise NotImplementedError("a LinformerCacheLayer is filled by its attention")

    def update(self, *_: Any, **__: Any):
        raise NotImplementedError("a LinformerCacheLayer is filled by its attention")


class LinformerCache(Cache):
    """The cache of a decoder: in each layer, `slots` rows for each finished block, and the open block.

    >>> cache = LinformerCache(LinformerConfig(num_hidden_layers=2))
    >>> cache.get_seq_length(), cache.nbytes
    (0, 0)
    """

    def __init__(self, config: LinformerConfig):
        layers = config.num_decoder_layers if config.is_encoder_decoder else None
        length = config.max_position_embeddings
        super().__init__(layers=[LinformerCacheLayer(length) for _ in range(layers or config.num_hidden_layers)])

    @property
    def has_source(self) -> bool:
        """Whether it holds the projected source of cross-attention."""
        return self.layers[0].source is not None

    @property
    def nbytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)


LAYER_TENSORS = ("past", "source_keys", "source_values", "source_present")


def flatten_cache(cache: LinformerCache) -> tuple[list[Any], int]:
    """The number of tokens and the tensors of each layer, and the rest."""
    layers: list[dict[str, Any]] = []
    for layer in cache.layers:
        parts = dict(zip(LAYER_TENSORS, (layer.past, *(layer.source or ())), strict=False))
        layers.append({name: part for name, part in parts.items() if part is not None})
    return [cache.layers[0].tokens, layers], cache.layers[0].max_length


def flatten_cache_with_names(cache: LinformerCache) -> tuple[list[tuple[Any, Any]], int]:
    """The same with the names that tensors have in an exported graph."""
    parts, max_length = flatten_cache(cache)
    return [(MappingKey(name), part) for name, part in zip(("tokens", "layers"), parts, strict=True)], max_length


def unflatten_cache(parts: Iterable[Any], max_length: int) -> LinformerCache:
    """The cache with these tensors."""
    cache, (tokens, layers) = LinformerCache.__new__(LinformerCache), parts
    Cache.__init__(cache, layers=[LinformerCacheLayer(max_length) for _ in layers])
    for layer, tensors in zip(cache.layers, layers, strict=True):
        layer.tokens = tokens
        layer.past, *source = (tensors.get(name) for name in LAYER_TENSORS)
        layer.source = None if source[0] is None else KeysValues(*source)
    return cache


# exported graphs take caches as inputs and return them
register_pytree_node(
    LinformerCache,
    flatten_cache,
    unflatten_cache,
    serialized_type_name="linformer_kit.LinformerCache",
    to_dumpable_context=int,
    from_dumpable_context=int,
    flatten_with_keys_fn=flatten_cache_with_names,
)
