"""The block-causal layer and its cache.

No mask over an N × K score matrix can hide the future once E has mixed it in. So the projection works inside blocks: each
finished block becomes `slots` summary rows, and a query attends, in one softmax, to its own block up to itself and to the
summaries of the blocks before it.

Shapes: B batch, T new tokens, P the tokens since the last finished block (open block, then new ones), S summary rows,
H heads, G key-value heads, D head size, F = G·D, C model size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .multihead_linformer import MultiHeadLayer, softmax_attention
from .options_linformer import checked_options, positive_integer
from .projection_linformer import NoProjection, Projection, is_number, real_positions, real_tokens_first, windows
from .validation_linformer import boolean_mask, check_features

# queries attended to at once, in whole blocks: enough for fast products, few enough to skip most of what they must not see
QUERY_CHUNK = 128


# one number for the whole batch, or, once examples were padded, a tensor (B,) with one for each
Count = int | Tensor


class Summaries(NamedTuple):
    """What stands for the finished blocks."""

    keys_BSF: Tensor
    values_BSF: Tensor


class Tokens(NamedTuple):
    """Tokens as they are, with their keys and values."""

    x_BPC: Tensor
    keys_BPF: Tensor
    values_BPF: Tensor


@dataclass(frozen=True)
class CausalCache:
    """What is kept between calls of `CausalLinformerAttention.step`: summary rows of finished blocks, and the open block.

    Padded examples have seen different numbers of tokens. Then `seen` is a tensor (B,) instead of a number, and each
    example's rows come first in `summaries` and `open`.
    """

    summaries: Summaries
    open: Tokens
    seen: Count
    made_with: dict[str, int]  # the sizes of the layer

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.summaries, *self.open))

    def reorder(self, index_B: Tensor) -> "CausalCache":
        """The cache of these examples of the batch, as beam search wants it."""
        return replace(
            self,
            summaries=Summaries(*(rows[index_B] for rows in self.summaries)),
            open=Tokens(*(rows[index_B] for rows in self.open)),
            seen=self.seen if isinstance(self.seen, int) else self.seen[index_B],
        )


def append_rows(old: Iterable[Tensor], new: Iterable[Tensor], old_count: Count, new_count: Count) -> list[Tensor]:
    """Of each pair of tensors, every example's first `old_count` old rows, then its first `new_count` new ones."""
    joined = [torch.cat(pair, dim=1) for pair in zip(old, new, strict=True)]
    if isinstance(old_count, int):
        return joined
    old_rows, new_rows = (next(iter(rows)).shape[1] for rows in (old, new))
    in_use = [real_positions(old_rows, old_count), real_positions(new_rows, torch.zeros_like(old_count) + new_count)]
    return [real_tokens_first(rows, torch.cat(in_use, dim=1))[0] for rows in joined]


def cut(rows_BPF: Tensor, pieces: list[tuple[int, int]]) -> Sequence[Tensor]:
    """The rows of each (first, after). The gradient of a slice is as long as what it was cut from, that of `split` is not."""
    if all(after == first for (_, after), (first, _) in pairwise([(0, 0), *pieces, (rows_BPF.shape[1], 0)])):
        return rows_BPF.split([after - first for first, after in pieces], dim=1)
    return [rows_BPF[:, first:after] for first, after in pieces]


def as_column(count: Count, device: torch.device) -> Tensor:
    """(1, 1) of a number, (B, 1) of a number per example."""
    return torch.full((1, 1), count, device=device) if isinstance(count, int) else count[:, None]


def visible(query_XQ: Tensor, token_XP: Tensor, summary_S: Tensor, block_length: int) -> Tensor:
    """(X, Q, S + P): which summaries and tokens a query sees, given their positions and, of summaries, the blocks."""
    query_XQ1, token_X1P = query_XQ[..., None], token_XP[:, None]
    own_block = token_X1P // block_length == query_XQ1 // block_length
    finished = summary_S < query_XQ1 // block_length
    return torch.cat([finished, own_block & (token_X1P <= query_XQ1)], dim=-1)


class CausalLinformerAttention(MultiHeadLayer):
    """Strictly causal attention over any length: the own block exactly, finished blocks as `slots` summary rows each.

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
        self, x: Tensor, *, mask: Tensor | None = None, projection: Projection | None = None, need_weights: bool = False
    ):
        """Attend from every token of `x` (B, T, C) to itself and to what came before; gives (B, T, C).

        `mask` (B, T) is True at real tokens; padding may stand anywhere. With `need_weights` also the (B, H, T, S + T)
        weights: first on the summaries, then on the tokens; with projection="none" (B, H, T, T), on the tokens.
        """
        output, weights, _ = self._advance(x, None, mask, projection, need_weights=need_weights)
        return (output, weights) if need_weights else output

    def step(
        self,
        x: Tensor,
        cache: CausalCache | None = None,
        *,
        mask: Tensor | None = None,
        projection: Projection | None = None,
    ) -> tuple[Tensor, CausalCache]:
        """The outputs of new tokens `x` (B, T, C), and the cache to pass with the next ones. The old cache stays valid."""
        output, _, new_cache = self._advance(x, cache, mask, projection, keep=True)
        return output, new_cache

    def _advance(self, x: Tensor, cache, mask, projection, need_weights=False, keep=False):
        """Join new tokens to the open block, summarise what is finished, attend: output, weights, and the cache to `keep`."""
        check_features("x", x, self.embed_dim, self._like(x))
        projection = self._projection(projection)
        slots = projection.rows(self.block_length)
        new: Count = x.shape[1]
        if mask is not None:
            x, new, place_BT = real_tokens_first(x, boolean_mask("mask", mask, x))
        seen: Count = 0
        tokens = Tokens(x, self.key(x), self.value(x))
        if cache is not None:
            if not isinstance(cache, CausalCache):
                raise TypeError(
                    f"cache is a {type(cache).__name__}; it must be the CausalCache that `step` gave, or None at first"
                )
            for name, size in self._sizes(slots).items():
                if cache.made_with[name] != size:
                    raise ValueError(
                        f"the cache was made by a layer with {name}={cache.made_with[name]} but this one has {name}={size}; "
                        "every layer goes on with its own cache"
                    )
            if cache.open.x_BPC.shape[0] != x.shape[0]:
                raise ValueError(
                    f"x holds {x.shape[0]} examples but the cache {cache.open.x_BPC.shape[0]}; pass the cache of this batch"
                )
            kept, now = cache.open.keys_BPF, tokens.keys_BPF
            if (kept.dtype, kept.device) != (now.dtype, now.device):
                raise ValueError(
                    f"the cache holds {kept.dtype} on {kept.device} but the new keys are {now.dtype} on {now.device}; "
                    "go on where the cache was made: same device, same dtype, same autocast"
                )
            seen = cache.seen if isinstance(new, int) else cache.seen + torch.zeros_like(new)
            tokens = Tokens(*append_rows(cache.open, tokens, seen % self.block_length, new))
        if cache is not None and tokens.x_BPC.shape[1] < self.block_length:  # no block is finished by these tokens
            summaries = cache.summaries
        else:
            summaries = self._summarise(projection, tokens)
            if cache is not None:
                before, after = seen // self.block_length, (seen + new) // self.block_length
                summaries = Summaries(
                    *append_rows(cache.summaries, summaries, before * slots, (after - before) * slots)
                )

        if isinstance(projection, NoProjection) and cache is None and self.fused and not need_weights:
            heads_BTF, weights = self._attend_to_all(self.query(x), tokens), None
        else:
            heads_BTF, weights = self._attend(self.query(x), tokens, summaries, seen, slots, need_weights)
            if weights is not None and isinstance(projection, NoProjection) and isinstance(seen, int):
                # a token of a finished block is its own summary: one column for both
                on_summaries, on_tokens = weights.split([summaries.keys_BSF.shape[1], tokens.x_BPC.shape[1]], dim=-1)
                before = seen // self.block_length * self.block_length
                weights = F.pad(on_tokens, (before, 0)) + F.pad(
                    on_summaries, (0, before + on_tokens.shape[-1] - on_summaries.shape[-1])
                )
        output = self.output(heads_BTF)
        if mask is not None:  # back to where the tokens stood
            batch_B1 = torch.arange(x.shape[0], device=x.device)[:, None]
            output = output[batch_B1, place_BT]
            if weights is not None:
                on_summaries, on_tokens = weights.transpose(1, 2)[batch_B1, place_BT].split(
                    [weights.shape[-1] - x.shape[1], x.shape[1]], -1
                )
                on_tokens = on_tokens.movedim(-1, 1)[batch_B1, place_BT].movedim(1, -1)
                weights = torch.cat([on_summaries, on_tokens], dim=-1).transpose(1, 2)
        return output, weights, self._keep(cache, summaries, tokens, seen, seen + new, slots) if keep else None

    def _summarise(self, projection: Projection, tokens: Tokens) -> Summaries:
        """`slots` rows for each finished block."""
        x_BPC, (batch, length) = tokens.x_BPC, tokens.x_BPC.shape[:2]
        # while exported for many lengths, what is not finished is summarised, too: nothing will see it
        blocks = length // self.block_length if is_number(length) else windows(length, self.block_length)
        finished = blocks * self.block_length
        if isinstance(projection, NoProjection):  # every token stands for itself, and has its keys and values already
            finished = finished if is_number(length) else length
            return Summaries(tokens.keys_BPF[:, :finished], tokens.values_BPF[:, :finished])
        x_BPC = x_BPC[:, :finished] if is_number(length) else F.pad(x_BPC, (0, 0, 0, finished - length))
        blocks_XNC = x_BPC.reshape(batch * blocks, self.block_length, self.embed_dim)
        rows_XMKC = projection(blocks_XNC).rows_BMKC

        def rows(linear, rows_XMKC: Tensor) -> Tensor:
            features_XGKD = self._project_rows(linear, rows_XMKC)
            return features_XGKD.transpose(1, 2).reshape(
                batch, blocks * rows_XMKC.shape[2], self.num_kv_heads * self.head_dim
            )

        return Summaries(
            rows(self.key, rows_XMKC[:, projection.of_keys()]), rows(self.value, rows_XMKC[:, projection.of_values()])
        )

    def _attend_to_all(self, query_BTF: Tensor, tokens: Tokens) -> Tensor:
        """What `_attend` gives where nothing is shortened and nothing came before, in one call: ordinary causal attention."""
        query_BHTD = query_BTF.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        heads_BHTD = F.scaled_dot_product_attention(
            query_BHTD,
            self._heads(tokens.keys_BPF),
            self._heads(tokens.values_BPF),
            is_causal=True,
            dropout_p=self._dropout_now(),
        )
        return heads_BHTD.transpose(1, 2).flatten(2)

    def _attend(
        self, query_BTF: Tensor, tokens: Tokens, summaries: Summaries, seen: Count, slots: int, need_weights: bool
    ):
        """Each chunk of queries against the summaries before it and the tokens around it; `seen` tokens came before all of them."""
        block, device, length = self.block_length, query_BTF.device, query_BTF.shape[1]
        all_tokens, all_summaries = tokens.x_BPC.shape[1], summaries.keys_BSF.shape[1]
        first_token_X1 = as_column(seen, device) // block * block
        chunk = max(1, QUERY_CHUNK // block) * block
        if not is_number(length):  # exported for many lengths: how many chunks there will be is not known
            queries = around = [(0, length)]
        elif isinstance(seen, int):  # chunks end where blocks do, so that their tokens do not overlap
            opened = seen % block
            queries = list(pairwise([0, *range(chunk - opened, length, chunk), length]))
            around = [(low + opened if low else 0, high + opened) for low, high in queries]
        else:  # every example stands elsewhere in its block: take what any of them may see
            queries = list(pairwise([*range(0, length, chunk), length]))
            around = [(first // block * block, min(after + block - 1, all_tokens)) for first, after in queries]
        outputs, all_weights = [], []
        for (first, after), (low, high), query_BQF, token_keys_BPF, token_values_BPF in zip(
            queries,
            around,
            cut(query_BTF, queries),
            cut(tokens.keys_BPF, around),
            cut(tokens.values_BPF, around),
            strict=True,
        ):
            query_BHQD = query_BQF.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            before = (
                (seen + after - 1) // block * slots if isinstance(seen, int) and is_number(length) else all_summaries
            )
            visible_X1QK = None
            if length > 1 or not isinstance(seen, int):  # a single new token sees all there is
                visible_X1QK = visible(
                    as_column(seen, device) + torch.arange(first, after, device=device),
                    first_token_X1 + torch.arange(low, high, device=device),
                    torch.arange(before, device=device) // slots,
                    block,
                )[:, None]
            keys_BHKD = self._heads(torch.cat([summaries.keys_BSF[:, :before], token_keys_BPF], dim=1))
            values_BHKD = self._heads(torch.cat([summaries.values_BSF[:, :before], token_values_BPF], dim=1))
            heads_BHQD, weights_BHQK = softmax_attention(
                query_BHQD, keys_BHKD, values_BHKD, visible_X1QK, self._dropout_now(), need_weights, self.fused
            )
            outputs.append(heads_BHQD.transpose(1, 2).flatten(2))
            if weights_BHQK is not None:  # in the columns of all summaries and all tokens
                on_summaries, on_tokens = weights_BHQK.split([before, high - low], dim=-1)
                on_summaries = F.pad(on_summaries, (0, all_summaries - before))
                all_weights.append(torch.cat([on_summaries, F.pad(on_tokens, (low, all_tokens - high))], dim=-1))
        return torch.cat(outputs, dim=1), torch.cat(all_weights, dim=2) if need_weights else None

    def _heads(self, features_BKF: Tensor) -> Tensor:
        """(B, K, F) to (B, H, K, D)."""
        return self._for_every_head(features_BKF.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2))

    def _keep(
        self,
        cache: CausalCache | None,
        summaries: Summaries,
        tokens: Tokens,
        seen_before: Count,
        seen: Count,
        slots: int,
    ) -> CausalCache:
        """The summaries of finished blocks and the tokens of the open one; copies, which do not keep the whole input alive."""
        blocks, still_open = seen // self.block_length, seen % self.block_length
        first_open = (blocks - seen_before // self.block_length) * self.block_length
        if isinstance(still_open, int):
            kept = Tokens(*(rows[:, first_open : first_open + still_open].clone() for rows in tokens))
        else:
            place_BP = as_column(first_open, still_open.device) + torch.arange(
                int(still_open.max()), device=still_open.device
            )
            batch_B1 = torch.arange(len(still_open), device=still_open.device)[:, None]
            # examples with a shorter open block fill up with rows that nothing will see
            kept = Tokens(*(rows[batch_B1, place_BP.clamp(max=rows.shape[1] - 1)] for rows in tokens))
        if cache is None or summaries is not cache.summaries:
            most = (blocks if isinstance(blocks, int) else int(blocks.max())) * slots
            summaries = Summaries(*(rows[:, :most].clone() for rows in summaries))
        return CausalCache(summaries, kept, seen, self._sizes(slots))

    def _sizes(self, slots: int) -> dict[str, int]:
        """What another layer must have in common to go on with a cache of this one."""
        return {
            "embed_dim": self.embed_dim,
            "head_dim": self.head_dim,
            "num_kv_heads": self.num_kv_heads,
            "block_length": self.block_length,
            "slots": slots,
        }
