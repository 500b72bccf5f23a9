"""The block-causal layer and its cache.

Once E has mixed all positions, no mask over the N × K scores can hide the future. So the projection works inside
blocks: each finished block becomes `slots` summary rows. A query attends, in one softmax, to the tokens of its own
block up to itself and to the summaries of the earlier blocks.

Shapes: B batch, T new tokens, P tokens since the last finished block (open block, then new tokens), S summary rows,
H heads, G key-value heads, D head size, F = G·D, C model size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import MappingKey, register_pytree_node

from .multihead_linformer import MultiHeadLayer, linear_into, softmax_attention, softmax_weights
from .options_linformer import checked_options, positive_integer
from .projection_linformer import (
    NoProjection,
    Projection,
    is_static,
    real_positions,
    real_tokens_first,
    split_windows,
    windows,
)
from .validation_linformer import boolean_mask, can_read_values, check_features, computes_in_chunks

# queries per call of the softmax on CPUs, in whole blocks: enough for fast products, few enough to skip most of the
# masked scores
QUERY_CHUNK = 128
# tokens per chunk on CPUs when no gradient is needed: their queries, keys and values stay in the processor's cache
TOKEN_CHUNK = 2048
# elements of the keys in a call of the softmax on other devices, where a call should have as many queries as fit
TILE_ELEMENTS = 2**28

# the tensors of a cache, in the order in which an exported graph has them
CACHE_TENSORS = ("summary_keys", "summary_values", "open_tokens", "open_keys", "open_values", "seen")

# one number for the whole batch, or, if the batch was padded, a tensor (B,)
Count = int | Tensor


class Summaries(NamedTuple):
    """Keys and values of the finished blocks, `slots` rows for each."""

    keys_BSF: Tensor
    values_BSF: Tensor


class Tokens(NamedTuple):
    """Tokens with their keys and values."""

    x_BPC: Tensor
    keys_BPF: Tensor
    values_BPF: Tensor


@dataclass(frozen=True)
class CausalCache:
    """The state between calls of `CausalLinformerAttention.step`: summaries of finished blocks, and the open block.

    In a padded batch, examples have different numbers of tokens: `seen` is a tensor (B,), and the rows of each
    example come first in `summaries` and `open`.
    """

    summaries: Summaries
    open: Tokens
    seen: Count
    sizes: dict[str, int]  # of the layer that made it
    columns: int | None = None  # tokens so far, with padding: at least `seen`; not known after an exported graph

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.summaries, *self.open))

    def reorder(self, index_B: Tensor) -> "CausalCache":
        """Select examples of the batch, for beam search."""
        return replace(
            self,
            summaries=Summaries(*(rows[index_B] for rows in self.summaries)),
            open=Tokens(*(rows[index_B] for rows in self.open)),
            seen=self.seen if isinstance(self.seen, int) else self.seen[index_B],
        )


def flatten_cache(cache: CausalCache) -> tuple[list[Any], tuple[tuple[str, int], ...]]:
    """The tensors of a cache, and the rest."""
    return [*cache.summaries, *cache.open, cache.seen], tuple(cache.sizes.items())


def flatten_cache_with_names(cache: CausalCache) -> tuple[list[tuple[Any, Any]], tuple[tuple[str, int], ...]]:
    """The tensors of a cache with the names that they have in an exported graph, and the rest."""
    tensors, sizes = flatten_cache(cache)
    return [(MappingKey(name), tensor) for name, tensor in zip(CACHE_TENSORS, tensors, strict=True)], sizes


def unflatten_cache(tensors: Iterable[Any], sizes: Iterable[tuple[str, int]]) -> CausalCache:
    """The cache with these tensors."""
    summary_keys, summary_values, *open_rows, seen = tensors
    return CausalCache(Summaries(summary_keys, summary_values), Tokens(*open_rows), seen, dict(sizes))


# exported graphs take caches as inputs and return them
register_pytree_node(
    CausalCache,
    flatten_cache,
    unflatten_cache,
    serialized_type_name="linformer_kit.CausalCache",
    to_dumpable_context=list,
    from_dumpable_context=lambda sizes: tuple((name, size) for name, size in sizes),
    flatten_with_keys_fn=flatten_cache_with_names,
)


def append_rows(old: Iterable[Tensor], new: Iterable[Tensor], old_count: Count, new_count: Count) -> list[Tensor]:
    """Join each pair of tensors: `old_count` old rows of each example, then `new_count` new rows."""
    joined = [torch.cat(pair, dim=1) for pair in zip(old, new, strict=True)]
    if isinstance(old_count, int):
        return joined
    old_rows, new_rows = (next(iter(rows)).shape[1] for rows in (old, new))
    in_use = [real_positions(old_rows, old_count), real_positions(new_rows, torch.zeros_like(old_count) + new_count)]
    return [real_tokens_first(rows, torch.cat(in_use, dim=1))[0] for rows in joined]


def slice_rows(rows_BPF: Tensor, pieces: list[tuple[int, int]]) -> Sequence[Tensor]:
    """The rows of each (first, after), by `split` if possible: the gradient of a slice has the size of the input."""
    if all(after == first for (_, after), (first, _) in pairwise([(0, 0), *pieces, (rows_BPF.shape[1], 0)])):
        return rows_BPF.split([after - first for first, after in pieces], dim=1)
    return [rows_BPF[:, first:after] for first, after in pieces]


def largest(count: Tensor, bound: int | None) -> int:
    """The largest of the counts, or a `bound` that none exceeds where reading their values is not free."""
    return int(count.max()) if bound is None or can_read_values(count) else bound


def prefers_large_calls(x: Tensor) -> bool:
    """Whether few and large calls are faster than many that use the processor's cache: everywhere but on CPUs."""
    return x.device.type != "cpu"


def before_each(summaries_BSF: Tensor, counts: Sequence[int], tokens: Sequence[Tensor]) -> Iterator[Tensor]:
    """For each chunk of tokens, (B, S + P, F): so many of the summaries, then its tokens.

    Without gradients, all chunks share one buffer: each is valid until the next.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or len(tokens) == 1:
        yield from (
            torch.cat([summaries_BSF[:, :count], tokens_BPF], dim=1)
            for count, tokens_BPF in zip(counts, tokens, strict=True)
        )
        return
    batch, _, features = summaries_BSF.shape
    longest = max(tokens_BPF.shape[1] for tokens_BPF in tokens)
    buffer_BKF, done = summaries_BSF.new_empty(batch, counts[-1] + longest, features), 0
    for count, tokens_BPF in zip(counts, tokens, strict=True):
        after = count + tokens_BPF.shape[1]
        buffer_BKF[:, done:count] = summaries_BSF[:, done:count]
        buffer_BKF[:, count:after] = tokens_BPF
        yield buffer_BKF[:, :after]
        done = count


def with_summaries(summaries_BSF: Tensor, tokens_BnQF: Tensor) -> Tensor:
    """(B·n, S + Q, F): for each chunk of tokens, the summaries, then its tokens."""
    summaries_BnSF = summaries_BSF[:, None].expand(-1, tokens_BnQF.shape[1], -1, -1)
    return torch.cat([summaries_BnSF, tokens_BnQF], dim=2).flatten(0, 1)


def in_places(output_BTC: Tensor, place_BT: Tensor) -> Tensor:
    """The outputs in the order of the input: the reverse of `real_tokens_first`."""
    return output_BTC[torch.arange(output_BTC.shape[0], device=output_BTC.device)[:, None], place_BT]


def as_column(count: Count, device: torch.device) -> Tensor:
    """A count as a (1, 1) or (B, 1) tensor."""
    return torch.full((1, 1), count, device=device) if isinstance(count, int) else count[:, None]


def visible(query_XQ: Tensor, token_XP: Tensor, summary_S: Tensor, block_length: int) -> Tensor:
    """(X, Q, S + P), True where a query sees a summary or token, from positions and the block numbers of summaries."""
    query_XQ1, token_X1P = query_XQ[..., None], token_XP[:, None]
    own_block = token_X1P // block_length == query_XQ1 // block_length
    finished = summary_S < query_XQ1 // block_length
    return torch.cat([finished, own_block & (token_X1P <= query_XQ1)], dim=-1)


class CausalLinformerAttention(MultiHeadLayer):
    """Causal attention over any length: to the current block exactly, to each finished block as `slots` summary rows.

    >>> attention = CausalLinformerAttention(embed_dim=64, num_heads=4, block_length=32, slots=4)
    >>> x = torch.randn(2, 100, 64)
    >>> whole = attention(x)
    >>> start, cache = attention.step(x[:, :70])  # the same outputs, piece by piece
    >>> rest, cache = attention.step(x[:, 70:], cache)
    >>> torch.allclose(torch.cat([start, rest], dim=1), whole, atol=1e-5)
    True
    >>> [rows.shape[1] for rows in (cache.summaries.keys_BSF, cache.open.keys_BPF)]  # 3 blocks of 32, and 4 tokens
    [12, 4]
    """

    @checked_options
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        block_length: int = 128,
        slots: int = 4,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        projection: str = "linear",
        sharing: str = "headwise",
        dropout: float = 0.0,
        bias: bool = True,
    ):
        super().__init__(
            embed_dim,
            num_heads,
            max_length=positive_integer("block_length", block_length),
            projected_length=positive_integer("slots", slots),
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            projection=projection,
            sharing=sharing,
            rescale=False,  # only full blocks are projected
            dropout=dropout,
            bias=bias,
        )
        self.block_length = block_length

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        projection: Projection | None = None,
        need_weights: bool = False,
        fused: bool = True,
    ):
        """Attend from each token of `x` (B, T, C) to itself and the tokens before it. Returns (B, T, C).

        - `mask` (B, T) is True at real tokens; padding may be anywhere.
        - `projection` replaces the projection of the layer in this call. It has the same number of rows, or more,
          which are cut to `slots` (see `Projection.cut`). With `sharing="layerwise"` it is required.
        - `need_weights` also returns the (B, H, T, S + T) attention weights on summaries and tokens; with
          projection="none" they are (B, H, T, T), on the tokens.
        - `fused=False` computes the softmax in separate steps, which stores the weights.
        """
        output, weights, _ = self.advance(x, None, mask, projection, need_weights, fused, keep_cache=False)
        return (output, weights) if need_weights else output

    def step(
        self,
        x: Tensor,
        cache: CausalCache | None = None,
        *,
        mask: Tensor | None = None,
        projection: Projection | None = None,
    ) -> tuple[Tensor, CausalCache]:
        """The outputs of new tokens `x` (B, T, C), and the cache for the next call. The old cache stays valid."""
        output, _, new_cache = self.advance(x, cache, mask, projection)
        assert new_cache is not None
        return output, new_cache

    def advance(
        self,
        x: Tensor,
        cache: CausalCache | None = None,
        mask: Tensor | None = None,
        projection: Projection | None = None,
        need_weights: bool = False,
        fused: bool = True,
        keep_cache: bool = True,
        max_length: int | None = None,
    ) -> tuple[Tensor, Tensor | None, CausalCache | None]:
        """Append tokens to the open block, summarize finished blocks, attend. Returns output, weights and new cache.

        With `max_length`, the new cache has room for that many tokens, and shapes that do not depend on their number.
        """
        check_features("x", x, self.embed_dim, self._like(x))
        projection = self._projection(projection)
        slots = projection.rows(self.block_length)
        new: Count = x.shape[1]
        if mask is not None:
            x, new, place_BT = real_tokens_first(x, boolean_mask("mask", mask, x))
        if not (need_weights or keep_cache or isinstance(projection, NoProjection)) and computes_in_chunks(x):
            output = self._in_chunks(x, projection, slots, fused)
            return output if mask is None else in_places(output, place_BT), None, None
        seen: Count = 0
        tokens = Tokens(x, self.key(x), self.value(x))
        if cache is not None:
            self._check_cache(cache, tokens, slots)
            seen = cache.seen + torch.zeros_like(new) if isinstance(new, Tensor) else cache.seen
            tokens = Tokens(*append_rows(cache.open, tokens, seen % self.block_length, new))
        if cache is not None and tokens.x_BPC.shape[1] < self.block_length:  # these tokens finish no block
            summaries = cache.summaries
        else:
            summaries = self._summarize(projection, tokens.x_BPC, tokens)
            if cache is not None:
                before, after = seen // self.block_length, (seen + new) // self.block_length
                summaries = Summaries(
                    *append_rows(cache.summaries, summaries, before * slots, (after - before) * slots)
                )

        weights, query_BTF = None, self.query(x)
        if need_weights:
            is_full, places = isinstance(projection, NoProjection), None if mask is None else place_BT
            heads_BTF, weights = self._attend_with_weights(query_BTF, tokens, summaries, seen, slots, is_full, places)
        elif isinstance(projection, NoProjection) and cache is None and fused:
            heads_BTF = self._attend_to_all(query_BTF, tokens)
        else:
            heads_BTF = self._attend(query_BTF, tokens, summaries, seen, slots, fused)
        output = self.output(heads_BTF)
        if mask is not None and not need_weights:  # back to the order of the input
            output = in_places(output, place_BT)
        if not keep_cache:
            return output, weights, None
        return output, weights, self._new_cache(cache, summaries, tokens, seen, seen + new, slots, max_length)

    def _in_chunks(self, x: Tensor, projection: Projection, slots: int, fused: bool) -> Tensor:
        """The outputs without gradients and caches, of about `TOKEN_CHUNK` tokens at a time."""
        batch, length = x.shape[:2]
        summaries = self._summarize(projection, x)
        output = summaries.values_BSF.new_empty(batch, length, self.embed_dim)
        examples = max(1, TOKEN_CHUNK // length)
        size = max(1, TOKEN_CHUNK // self.block_length) * self.block_length
        for example in range(0, batch, examples):
            some = slice(example, example + examples)
            for first in range(0, length, size):
                piece = x[some, first : first + size]
                tokens = Tokens(piece, self.key(piece), self.value(piece))
                finished = Summaries(*(rows[some] for rows in summaries))
                heads_BTF = self._attend(self.query(piece), tokens, finished, first, slots, fused)
                linear_into(output[some, first : first + size], self.output, heads_BTF)
        return output

    def _check_projection(self, given: Projection) -> None:
        super()._check_projection(given)
        if given.sized_by_max_length and given.options is not None and given.options["max_length"] != self.block_length:
            raise ValueError(
                f"the projection was built with max_length={given.options['max_length']} but this layer needs "
                f"max_length={self.block_length}, its block_length; build it with the options of the layer"
            )

    def _check_cache(self, cache: CausalCache, new_tokens: Tokens, slots: int) -> None:
        """Raise if the cache belongs to another layer, batch or dtype."""
        if not isinstance(cache, CausalCache):
            raise TypeError(
                f"cache is a {type(cache).__name__}; it must be the CausalCache returned by `step`, or None at first"
            )
        for name, size in self._sizes(slots).items():
            if cache.sizes[name] != size:
                raise ValueError(
                    f"the cache was made by a layer with {name}={cache.sizes[name]} but this one has {name}={size}; "
                    "pass each layer its own cache"
                )
        batch, new_batch = cache.open.x_BPC.shape[0], new_tokens.x_BPC.shape[0]
        if batch != new_batch:
            raise ValueError(f"x has {new_batch} examples but the cache has {batch}; pass the cache of this batch")
        kept, now = cache.open.keys_BPF, new_tokens.keys_BPF
        if (kept.dtype, kept.device) != (now.dtype, now.device):
            raise ValueError(
                f"the cache is {kept.dtype} on {kept.device} but the new keys are {now.dtype} on {now.device}; "
                "use the same device, dtype and autocast in all calls"
            )

    def _summarize(self, projection: Projection, x_BPC: Tensor, tokens: Tokens | None = None) -> Summaries:
        """`slots` rows for each finished block; without projection, from the keys and values of `tokens`."""
        batch, length = x_BPC.shape[:2]
        # with a symbolic length, the open block is summarized too; no query sees it
        blocks = length // self.block_length if is_static(length) else windows(length, self.block_length)
        finished = blocks * self.block_length
        if isinstance(projection, NoProjection):  # a token is its own summary, and its keys and values exist already
            assert tokens is not None
            finished = finished if is_static(length) else length
            return Summaries(tokens.keys_BPF[:, :finished], tokens.values_BPF[:, :finished])
        x_BPC = x_BPC[:, :finished] if is_static(length) else F.pad(x_BPC, (0, 0, 0, finished - length))
        blocks_XNC = x_BPC.reshape(batch * blocks, self.block_length, self.embed_dim)
        key_rows_XMKC, value_rows_XMKC = projection.split_rows(projection(blocks_XNC).rows_BMKC)
        keys_XGKD, values_XGKD = projection.finish(
            self._project_rows(self.key, key_rows_XMKC), self._project_rows(self.value, value_rows_XMKC)
        )
        shape = (batch, blocks * keys_XGKD.shape[2], self.num_kv_heads * self.head_dim)
        return Summaries(*(rows.transpose(1, 2).reshape(shape) for rows in (keys_XGKD, values_XGKD)))

    def _attend_to_all(self, query_BTF: Tensor, tokens: Tokens) -> Tensor:
        """`_attend` without projection and cache: full causal attention, in one fused call."""
        heads_BHTD = F.scaled_dot_product_attention(
            self._query_heads(query_BTF),
            self._heads(tokens.keys_BPF),
            self._heads(tokens.values_BPF),
            is_causal=True,
            dropout_p=self._dropout_now(),
        )
        return heads_BHTD.transpose(1, 2).flatten(2)

    def _attend(
        self, query_BTF: Tensor, tokens: Tokens, summaries: Summaries, seen: Count, slots: int, fused: bool
    ) -> Tensor:
        """Attend, in chunks of queries, to summaries and tokens; `seen` tokens came before the first query."""
        block, length = self.block_length, query_BTF.shape[1]
        all_tokens, all_summaries = tokens.x_BPC.shape[1], summaries.keys_BSF.shape[1]
        chunk = max(1, QUERY_CHUNK // block) * block
        is_in_one_call = not is_static(length)  # the number of chunks is not known
        if prefers_large_calls(query_BTF) and is_static(length) and length > chunk:
            if isinstance(seen, int):
                return self._attend_in_large_calls(query_BTF, tokens, summaries, seen, slots, fused)
            is_in_one_call = True
        counts, whole_11QK = [all_summaries], None
        if is_in_one_call:
            queries, around = [(0, length)], [(0, all_tokens)]
        elif isinstance(seen, int):  # chunks end at the ends of blocks, so that their tokens do not overlap
            opened = seen % block
            queries = list(pairwise([0, *range(chunk - opened, length, chunk), length]))
            around = [(low + opened if low else 0, high + opened) for low, high in queries]
            counts = [(seen + after - 1) // block * slots for _, after in queries]
            if len(queries) > 1:
                whole_11QK = self._bias_of_chunk(chunk, counts[-1], slots, query_BTF)
        else:  # examples are at different places of their blocks: take all tokens that any of them may see
            queries = list(pairwise([*range(0, length, chunk), length]))
            around = [(first // block * block, min(after + block - 1, all_tokens)) for first, after in queries]
            counts *= len(queries)
        outputs = []
        for (first, after), (low, high), before, query_BQF, keys_BKF, values_BKF in zip(
            queries,
            around,
            counts,
            slice_rows(query_BTF, queries),
            before_each(summaries.keys_BSF, counts, slice_rows(tokens.keys_BPF, around)),
            before_each(summaries.values_BSF, counts, slice_rows(tokens.values_BPF, around)),
            strict=True,
        ):
            mask_X1QK = None
            if whole_11QK is not None and after - first == high - low == chunk:
                mask_X1QK = whole_11QK[..., whole_11QK.shape[-1] - chunk - before :]
            elif length > 1 or not isinstance(seen, int):  # a single new token sees everything
                mask_X1QK = self._visible(seen, (first, after), (low, high), before, slots, query_BTF.device)
            heads_BHQD, _ = softmax_attention(
                self._query_heads(query_BQF),
                self._heads(keys_BKF),
                self._heads(values_BKF),
                mask_X1QK,
                self._dropout_now(),
                need_weights=False,
                fused=fused,
            )
            outputs.append(heads_BHQD.transpose(1, 2).flatten(2))
        return torch.cat(outputs, dim=1)

    def _attend_in_large_calls(
        self, query_BTF: Tensor, tokens: Tokens, summaries: Summaries, seen: int, slots: int, fused: bool
    ) -> Tensor:
        """`_attend` for devices that need few and large calls: all chunks at once, each with a copy of the summaries.

        Only if the copies have more than `TILE_ELEMENTS` elements, there are several calls.
        """
        block, (batch, length), device = self.block_length, query_BTF.shape[:2], query_BTF.device
        opened, size = seen % block, max(1, QUERY_CHUNK // block) * block
        tiles = windows(opened + length, size)
        query_BnQF, keys_BnQF, values_BnQF = (
            split_windows(F.pad(rows_BPF, (0, 0, before, tiles * size - before - rows_BPF.shape[1])), size)
            for rows_BPF, before in ((query_BTF, opened), (tokens.keys_BPF, 0), (tokens.values_BPF, 0))
        )
        position_nQ = (seen - opened + torch.arange(tiles * size, device=device)).view(tiles, size)
        most = (seen + length - 1) // block * slots
        at_once = max(1, TILE_ELEMENTS // (batch * (most + size) * self.num_heads * self.head_dim))
        outputs = []
        for first in range(0, tiles, at_once):
            some = slice(first, first + at_once)
            summary_S = torch.arange(most, device=device) // slots
            visible_nQK = visible(position_nQ[some], position_nQ[some], summary_S, block)
            heads_XHQD, _ = softmax_attention(
                self._query_heads(query_BnQF[:, some].flatten(0, 1)),
                self._heads(with_summaries(summaries.keys_BSF[:, :most], keys_BnQF[:, some])),
                self._heads(with_summaries(summaries.values_BSF[:, :most], values_BnQF[:, some])),
                visible_nQK.repeat(batch, 1, 1)[:, None],
                self._dropout_now(),
                need_weights=False,
                fused=fused,
            )
            outputs.append(heads_XHQD.transpose(1, 2).reshape(batch, -1, query_BTF.shape[-1]))
        return torch.cat(outputs, dim=1)[:, opened : opened + length]

    def _bias_of_chunk(self, chunk: int, summaries: int, slots: int, query_BTF: Tensor) -> Tensor:
        """(1, 1, Q, S + Q), what is added to the scores of a whole chunk: its columns, from the right, fit all chunks.

        All queries see the summaries of the blocks before the chunk. The fused kernel is faster with it than with a
        boolean mask, which it converts in each call.
        """
        inner = (chunk // self.block_length - 1) * slots
        visible_11QK = self._visible(0, (0, chunk), (0, chunk), inner, slots, query_BTF.device)
        bias_11QK = query_BTF.new_zeros(visible_11QK.shape).masked_fill(~visible_11QK, -torch.inf)
        return F.pad(bias_11QK, (summaries - inner, 0))

    def _attend_with_weights(
        self,
        query_BTF: Tensor,
        tokens: Tokens,
        summaries: Summaries,
        seen: Count,
        slots: int,
        is_full: bool,
        place_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`_attend` at once, from the (B, H, T, S + P) weights that it returns, in the order of the input.

        The output is computed from the returned tensor itself, so that it has a gradient.
        """
        rows, length = summaries.keys_BSF.shape[1], tokens.x_BPC.shape[1]
        visible_X1TK = self._visible(seen, (0, query_BTF.shape[1]), (0, length), rows, slots, query_BTF.device)
        keys_BHKD = self._heads(torch.cat([summaries.keys_BSF, tokens.keys_BPF], dim=1))
        weights_BHTK = softmax_weights(self._query_heads(query_BTF), keys_BHKD, visible_X1TK)
        summary_values_BSF, token_values_BPF = summaries.values_BSF, tokens.values_BPF
        if is_full and isinstance(seen, int):  # a token of a finished block is its own summary: one column for both
            on_summaries, on_tokens = weights_BHTK.split([rows, length], dim=-1)
            before = seen // self.block_length * self.block_length
            weights_BHTK = F.pad(on_tokens, (before, 0)) + F.pad(on_summaries, (0, before + length - rows))
            summary_values_BSF = summary_values_BSF[:, :before]
        if place_BT is not None:
            batch_B1 = torch.arange(place_BT.shape[0], device=place_BT.device)[:, None]
            weights_BTHK = weights_BHTK.transpose(1, 2)[batch_B1, place_BT]
            if length == query_BTF.shape[1]:  # no token is cached: those of the columns are those of the queries
                on_summaries, on_tokens = weights_BTHK.split([weights_BTHK.shape[-1] - length, length], dim=-1)
                on_tokens = on_tokens.movedim(-1, 1)[batch_B1, place_BT].movedim(1, -1)
                weights_BTHK = torch.cat([on_summaries, on_tokens], dim=-1)
                token_values_BPF = token_values_BPF[batch_B1, place_BT]
            weights_BHTK = weights_BTHK.transpose(1, 2)
        values_BHKD = self._heads(torch.cat([summary_values_BSF, token_values_BPF], dim=1))
        heads_BHTD = F.dropout(weights_BHTK, self._dropout_now()) @ values_BHKD
        return heads_BHTD.transpose(1, 2).flatten(2), weights_BHTK

    def _visible(
        self,
        seen: Count,
        queries: tuple[int, int],
        around: tuple[int, int],
        summaries: int,
        slots: int,
        device: torch.device,
    ) -> Tensor:
        """(X, 1, Q, S + P), True where a query sees a summary or a token, from (first, after) of both."""
        seen_X1, block = as_column(seen, device), self.block_length
        return visible(
            seen_X1 + torch.arange(*queries, device=device),
            seen_X1 // block * block + torch.arange(*around, device=device),
            torch.arange(summaries, device=device) // slots,
            block,
        )[:, None]

    def _query_heads(self, query_BTF: Tensor) -> Tensor:
        """(B, T, H·D) to (B, H, T, D)."""
        return query_BTF.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _heads(self, features_BKF: Tensor) -> Tensor:
        """(B, K, F) to (B, H, K, D)."""
        return self._for_every_head(features_BKF.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2))

    def _new_cache(
        self,
        cache: CausalCache | None,
        summaries: Summaries,
        tokens: Tokens,
        seen_before: Count,
        seen: Count,
        slots: int,
        max_length: int | None,
    ) -> CausalCache:
        """Summaries of finished blocks and tokens of the open one, copied so that the input can be freed.

        With `max_length`, the shapes do not depend on the number of tokens, for graphs: room for that many of them.
        """
        if max_length is not None and not isinstance(seen, Tensor):
            seen = torch.full(tokens.x_BPC.shape[:1], seen, device=tokens.x_BPC.device)
        blocks, still_open = seen // self.block_length, seen % self.block_length
        columns: int | None = tokens.x_BPC.shape[1]
        if cache is not None:
            new_columns = tokens.x_BPC.shape[1] - cache.open.x_BPC.shape[1]
            columns = None if cache.columns is None else cache.columns + new_columns
        first_open = (blocks - seen_before // self.block_length) * self.block_length
        if isinstance(still_open, int):
            kept = Tokens(*(rows[:, first_open : first_open + still_open].clone() for rows in tokens))
        else:
            most = self.block_length - 1 if max_length is not None else largest(still_open, self.block_length - 1)
            place_BP = as_column(first_open, still_open.device) + torch.arange(most, device=still_open.device)
            batch_B1 = torch.arange(still_open.shape[0], device=still_open.device)[:, None]
            # shorter open blocks are padded with rows that no query sees
            kept = Tokens(*(rows[batch_B1, place_BP.clamp(max=rows.shape[1] - 1)] for rows in tokens))
        if max_length is not None:
            most = max_length // self.block_length * slots
            summaries = Summaries(*(F.pad(rows, (0, 0, 0, most))[:, :most] for rows in summaries))
        elif cache is None or summaries is not cache.summaries:
            bound = None if columns is None else columns // self.block_length
            most = (blocks if isinstance(blocks, int) else largest(blocks, bound)) * slots
            summaries = Summaries(*(rows[:, :most].clone() for rows in summaries))
        return CausalCache(summaries, kept, seen, self._sizes(slots), columns)

    def _sizes(self, slots: int) -> dict[str, int]:
        """The sizes that a cache depends on."""
        return {
            "embed_dim": self.embed_dim,
            "head_dim": self.head_dim,
            "num_kv_heads": self.num_kv_heads,
            "block_length": self.block_length,
            "slots": slots,
        }
