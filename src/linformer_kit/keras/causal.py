"""Block-causal attention of the decoders, over a whole sequence or token by token.

Once E has mixed future tokens into a projected key, no mask can hide them. So the projection works inside blocks: each
complete block becomes `slots` summary rows. A query attends, in one softmax, to its own block up to itself and to the
summaries of the blocks before it. Without a projection the sequence is one block: full causal attention.

Real tokens come first and never see later positions, so padding needs no mask here.

Shapes: B batch, N tokens, X blocks, L block length, S slots, H heads, D head size, C model size.
"""

from typing import Any

import keras
from keras import ops

from ..models.options_linformer import WINDOW_IN_DECODER
from .attention import LinearMultiHeadAttention
from .projection import Projection
from .tokens import Tensor, at_least_float32, ceil_div, pad_to, split_blocks

# The state of one layer between tokens: inputs, keys and values of the current block, (B, L, …) each, and keys and
# values of the summaries, (B, X, S, H, D), allocated for the maximum number of blocks. Rows of incomplete blocks are
# undefined.
Cache = tuple[Tensor, ...]


@keras.saving.register_keras_serializable(package="linformer_kit")
class CausalLinearMultiHeadAttention(LinearMultiHeadAttention):
    """Every token attends to its block up to itself, and to the summaries of the blocks before it.

    `slots=None`: full causal attention.
    """

    def __init__(self, num_heads: int, key_dim: int, block_length: int = 128, slots: int | None = 4, **options: Any):
        if options.get("window_length"):
            raise ValueError(WINDOW_IN_DECODER.format(window_length=options["window_length"]))
        super().__init__(num_heads, key_dim, slots, max_length=block_length, **options)
        self.block_length = block_length

    def build(self, shape):  # type: ignore[override]
        super().build(shape, shape)

    def call(  # type: ignore[override]
        self, x_BNC: Tensor, training: bool | None = None, shared_projection: Projection | None = None
    ) -> Tensor:
        """(B, N, C) to (B, N, C)."""
        query_BNHD, keys_BNHD, values_BNHD = self.query_dense(x_BNC), self.key_dense(x_BNC), self.value_dense(x_BNC)
        if self.projection_dim is None:
            heads_BNHD, _ = self.softmax_attention(
                query_BNHD, keys_BNHD, values_BNHD, training=training, is_causal=True
            )
            return self.output_dense(heads_BNHD)
        length = ops.shape(x_BNC)[1]
        summaries = self._summaries(split_blocks(x_BNC, self.block_length), shared_projection)
        blocks = ops.shape(summaries[0])[1]
        own = [split_blocks(features, self.block_length) for features in (query_BNHD, keys_BNHD, values_BNHD)]
        place_L = ops.arange(self.block_length, dtype="int32")
        block_X = ops.arange(blocks, dtype="int32")
        heads_BXLHD = self._attend(
            own[0],
            own[1:],
            summaries,
            sees_token=(place_L[:, None] >= place_L)[None, None, None],
            sees_summary=(block_X[:, None] > block_X)[None, None, :, None, :],
            training=training,
        )
        heads_BNHD = ops.reshape(heads_BXLHD, (-1, blocks * self.block_length, self.num_heads, self.value_dim))
        return self.output_dense(heads_BNHD[:, :length])

    def compute_output_spec(self, x_BNC: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        return keras.KerasTensor(x_BNC.shape, dtype=self.compute_dtype)

    def compute_output_shape(self, shape: Any) -> Any:  # type: ignore[override]
        return shape

    def prefill(
        self, x_BNC: Tensor, lengths_B: Tensor, capacity: int, shared_projection: Projection | None
    ) -> tuple[Tensor, Cache]:
        """The outputs of a prompt, its real tokens first, and a cache for `capacity` tokens in total."""
        tokens = (x_BNC, self.key_dense(x_BNC), self.value_dense(x_BNC))
        output_BNC = self(x_BNC, training=False, shared_projection=shared_projection)
        if self.projection_dim is None:
            return output_BNC, tuple(pad_to(rows, capacity) for rows in tokens)
        max_blocks = ceil_div(capacity, self.block_length) + 1
        summaries = self._summaries(split_blocks(x_BNC, self.block_length), shared_projection)
        # the current block of each example: the next one if the prompt ends with a complete block
        is_current_BX = ops.arange(max_blocks, dtype="int32") == ops.expand_dims(lengths_B // self.block_length, 1)
        current = []
        for rows in tokens:
            blocks = pad_to(split_blocks(rows, self.block_length), max_blocks)
            selected = ops.reshape(is_current_BX, (-1, max_blocks, *[1] * (len(blocks.shape) - 2)))
            current.append(ops.sum(ops.where(selected, blocks, ops.zeros_like(blocks)), axis=1))
        return output_BNC, (*current, *(pad_to(rows, max_blocks) for rows in summaries))

    def step(
        self, x_B1C: Tensor, cache: Cache, seen_B: Tensor, shared_projection: Projection | None
    ) -> tuple[Tensor, Cache]:
        """The outputs of the next token of every example, which follows `seen_B` tokens, and the updated cache."""
        new = (x_B1C, self.key_dense(x_B1C), self.value_dense(x_B1C))
        block_length = ops.shape(cache[0])[1]
        place_L = ops.arange(block_length, dtype="int32")
        place_B, block_B = seen_B % block_length, seen_B // block_length
        here_BL = place_L == place_B[:, None]
        tokens = [replace_rows(old, rows, here_BL) for old, rows in zip(cache[:3], new, strict=True)]
        summaries, sees_summary = cache[3:], None
        if summaries:
            number_X = ops.arange(ops.shape(summaries[0])[1], dtype="int32")
            sees_summary = (number_X < block_B[:, None])[:, None, None, None]
        heads_BXLHD = self._attend(
            self.query_dense(x_B1C)[:, None],
            [rows[:, None] for rows in tokens[1:]],
            summaries,
            sees_token=(place_L <= place_B[:, None])[:, None, None, None],
            sees_summary=sees_summary,
            training=False,
        )
        if summaries:  # a block gets its summary with its last token
            is_complete_B1 = (place_B == block_length - 1)[:, None]
            here_BX = ops.logical_and(number_X == block_B[:, None], is_complete_B1)
            updated = self._summaries(tokens[0][:, None], shared_projection)
            summaries = tuple(replace_rows(old, rows, here_BX) for old, rows in zip(summaries, updated, strict=True))
        return self.output_dense(heads_BXLHD[:, 0]), (*tokens, *summaries)

    def _summaries(self, x_BXLC: Tensor, shared_projection: Projection | None) -> list[Tensor]:
        """Keys and values of the summary rows of each block, (B, X, S, H, D) each."""
        blocks = ops.shape(x_BXLC)[1]
        projection = self._select_projection(shared_projection)
        rows_ZMSC, _ = projection(ops.reshape(x_BXLC, (-1, *x_BXLC.shape[2:])))
        return [
            ops.reshape(features_ZSHD, (-1, blocks, *features_ZSHD.shape[1:]))
            for features_ZSHD in (
                projection.finish(self._features(dense, projection.rows_of(part, rows_ZMSC)), part)
                for dense, part in ((self.key_dense, "keys"), (self.value_dense, "values"))
            )
        ]

    def _attend(
        self, query_BXLHD: Tensor, tokens, summaries, sees_token, sees_summary, training: bool | None
    ) -> Tensor:
        """One softmax over the summaries and the tokens of the own block, for L queries in each of X blocks."""
        keys_BXMHD, values_BXMHD = tokens
        query_BXLHD = query_BXLHD * self._inverse_sqrt_key_dim
        on_tokens_BHXLM = ops.einsum("bxlhd,bxmhd->bhxlm", query_BXLHD, keys_BXMHD)
        scores = ops.where(sees_token, at_least_float32(on_tokens_BHXLM), -float("inf"))
        rows = 0
        if summaries:
            summary_keys_BYSHD, summary_values_BYSHD = summaries
            on_summaries_BHXLYS = ops.einsum("bxlhd,byshd->bhxlys", query_BXLHD, summary_keys_BYSHD)
            on_summaries_BHXLYS = ops.where(
                sees_summary[..., None], at_least_float32(on_summaries_BHXLYS), -float("inf")
            )
            blocks, queries = ops.shape(query_BXLHD)[1:3]
            rows = ops.shape(summary_keys_BYSHD)[1] * summary_keys_BYSHD.shape[2]
            on_summaries_BHXLZ = ops.reshape(on_summaries_BHXLYS, (-1, self.num_heads, blocks, queries, rows))
            scores = ops.concatenate([on_summaries_BHXLZ, scores], axis=-1)
        weights = self._dropout_layer(ops.cast(ops.softmax(scores, axis=-1), query_BXLHD.dtype), training=training)
        heads_BXLHD = ops.einsum("bhxlm,bxmhd->bxlhd", weights[..., rows:], values_BXMHD)
        if not summaries:
            return heads_BXLHD
        summary_values_BZHD = ops.reshape(summary_values_BYSHD, (-1, rows, self.num_heads, self.value_dim))
        return heads_BXLHD + ops.einsum("bhxlz,bzhd->bxlhd", weights[..., :rows], summary_values_BZHD)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config["slots"] = config.pop("projection_dim")
        config["block_length"] = config.pop("max_length")
        return config


def replace_rows(old: Tensor, new: Tensor, here: Tensor) -> Tensor:
    """(B, R, …) rows, replaced by `new` (B, 1, …) where `here` (B, R) is True."""
    return ops.where(ops.reshape(here, (*ops.shape(here), *[1] * (len(old.shape) - 2))), new, old)
