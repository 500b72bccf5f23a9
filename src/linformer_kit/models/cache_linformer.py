"""The cache of the decoders, in the form that `generate` expects."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .attention_linformer import KeysValues
from .causal_linformer import CausalCache
from .configuration_linformer import LinformerConfig


class LinformerCacheLayer(CacheLayerMixin):
    """The cache of one decoder layer: summaries and open block of its tokens, and K projected rows of the source."""

    supports_early_init = False

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.past: CausalCache | None = None
        self.source: KeysValues | None = None
        self.tokens = 0  # number of columns so far, including padding

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

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

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
        super().__init__(layers=[LinformerCacheLayer() for _ in range(layers or config.num_hidden_layers)])

    @property
    def nbytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)
