"""The equation as in the paper: nothing is reordered, fused or chunked. Tests and benchmarks compare with it.

Shapes: B batch, L queries, N tokens that give the keys, K rows, S summary rows, X tokens and rows, P positions, M
matrices, H heads, G key-value heads, D head size, C model size.
"""

import math

import torch
from torch import Tensor, nn

from .attention_linformer import LinformerAttention
from .causal_linformer import CausalLinformerAttention
from .multihead_linformer import MultiHeadLayer
from .projection_linformer import Blocks, NoProjection, Projection


def plain_attention(
    layer: LinformerAttention,
    x_BLC: Tensor,
    context_BNC: Tensor | None = None,
    projection: Projection | None = None,
) -> Tensor:
    """`softmax(Q (Eᵀ X W_K)ᵀ / √D) (Fᵀ X W_V) W_O` with the weights of `layer`, without padding: (B, L, C).

    `projection` is the shared projection of a layer with `sharing="layerwise"`.

    >>> layer, x = LinformerAttention(16, 2, max_length=8, projected_length=4), torch.randn(1, 8, 16)
    >>> torch.allclose(plain_attention(layer, x), layer(x), atol=1e-5)
    True
    """
    projection = layer.projection if projection is None else projection.cut(layer.projected_length)
    assert projection is not None
    query_BHLD = split_heads(layer.query(x_BLC), layer.num_heads)
    keys_BHKD, values_BHKD = projected_rows(layer, projection, x_BLC if context_BNC is None else context_BNC)
    weights_BHLK = (query_BHLD @ keys_BHKD.mT / math.sqrt(layer.head_dim)).softmax(dim=-1)
    return layer.output((weights_BHLK @ values_BHKD).transpose(1, 2).flatten(2))


def plain_window_attention(
    layer: LinformerAttention, x_BNC: Tensor, position_P: Tensor | None = None, projection: Projection | None = None
) -> Tensor:
    """One softmax over all tokens, of which a query sees those in its window, and the K rows: (B, P, C).

    The log of a row's mass outside of what the query sees is added to its score, and the distance bias, if there is
    one, to that of a token in the window.
    `position_P` are the queries, by default all tokens. There is no padding.

    >>> layer = LinformerAttention(16, 2, max_length=30, projected_length=4, window_length=5, global_tokens=1)
    >>> x, position_P = torch.randn(1, 30, 16), torch.tensor([0, 17, 29])
    >>> torch.allclose(plain_window_attention(layer, x, position_P), layer(x)[:, position_P], atol=1e-5)
    True
    """
    token_N, window = torch.arange(x_BNC.shape[1], device=x_BNC.device), layer.window_length
    position_P = token_N if position_P is None else position_P
    is_near_PN = (position_P[:, None] // window - token_N // window).abs() <= 1
    is_seen_PN = is_near_PN | (token_N < layer.global_tokens)
    bias_BHPX = torch.zeros_like(is_seen_PN, dtype=x_BNC.dtype).masked_fill(~is_seen_PN, -torch.inf)[None, None]
    if layer.distance_bias is not None:
        distance_PN = token_N - position_P[:, None]
        number_PN = (distance_PN + 2 * window - 1).clamp(0, 4 * window - 2)
        bias_HPN = layer.distance_bias.weight[number_PN].movedim(-1, 0)
        bias_BHPX = bias_BHPX + bias_HPN.masked_fill(~is_near_PN, 0)
    keys_BHXD, values_BHXD = projected_rows(layer, NoProjection(), x_BNC)  # of all tokens
    if layer.projected_length:
        projection = layer.projection if projection is None else projection.cut(layer.projected_length)
        assert projection is not None
        mass_BMNK = projection.mass_in_blocks(x_BNC, None, Blocks(len(token_N), size=1))
        unseen_BMPK = (~is_seen_PN).to(x_BNC.dtype) @ mass_BMNK.to(x_BNC.dtype)
        of_rows_BHPK = for_every_head(layer, unseen_BMPK.log().expand(-1, layer.num_kv_heads, -1, -1))[0]
        bias_BHPX = torch.cat([bias_BHPX.expand(*of_rows_BHPK.shape[:3], -1), of_rows_BHPK], dim=-1)
        rows = projected_rows(layer, projection, x_BNC)
        keys_BHXD, values_BHXD = torch.cat([keys_BHXD, rows[0]], dim=2), torch.cat([values_BHXD, rows[1]], dim=2)
    query_BHPD = split_heads(layer.query(x_BNC[:, position_P]), layer.num_heads)
    weights_BHPX = (query_BHPD @ keys_BHXD.mT / math.sqrt(layer.head_dim) + bias_BHPX).softmax(dim=-1)
    return layer.output((weights_BHPX @ values_BHXD).transpose(1, 2).flatten(2))


def plain_causal_attention(
    layer: CausalLinformerAttention, x_BNC: Tensor, projection: Projection | None = None
) -> Tensor:
    """One masked softmax over the summaries of all blocks and all tokens: (B, N, C).

    >>> layer, x = CausalLinformerAttention(16, 2, block_length=4, slots=2), torch.randn(1, 10, 16)
    >>> torch.allclose(plain_causal_attention(layer, x), layer(x), atol=1e-5)
    True
    """
    projection = layer.projection if projection is None else projection.cut(layer.projected_length)
    length = x_BNC.shape[1]
    assert projection is not None
    # without a projection, one block that is never finished: each earlier token is visible
    block = length + 1 if isinstance(projection, NoProjection) else layer.block_length
    blocks = [x_BNC[:, end - block : end] for end in range(block, length + 1, block)]
    slots = projection.rows(block)
    position_N1, token_N = torch.arange(length)[:, None], torch.arange(length)
    summary_S = torch.arange(len(blocks) * slots)
    is_finished_NS = summary_S // slots < position_N1 // block
    is_before_NN = (token_N <= position_N1) & (token_N // block == position_N1 // block)
    visible_NX = torch.cat([is_finished_NS, is_before_NN], dim=1).to(x_BNC.device)
    query_BHND = split_heads(layer.query(x_BNC), layer.num_heads)

    def features(key_rows_BMXC: Tensor, value_rows_BMXC: Tensor) -> tuple[Tensor, Tensor]:
        keys_BGXD = key_value_features(layer, layer.key, key_rows_BMXC)
        return keys_BGXD, key_value_features(layer, layer.value, value_rows_BMXC)

    rows = [projection.split_rows(projection(block_BNC).rows_BMKC) for block_BNC in blocks]
    summaries = [projection.finish(*features(*key_and_value_rows)) for key_and_value_rows in rows]
    parts = zip(*summaries, features(x_BNC[:, None], x_BNC[:, None]), strict=True)
    keys_BHXD, values_BHXD = for_every_head(layer, *(torch.cat(part, dim=2) for part in parts))
    scores_BHNX = (query_BHND @ keys_BHXD.mT / math.sqrt(layer.head_dim)).masked_fill(~visible_NX, -torch.inf)
    return layer.output((scores_BHNX.softmax(dim=-1) @ values_BHXD).transpose(1, 2).flatten(2))


def projected_rows(layer: MultiHeadLayer, projection: Projection, context_BNC: Tensor) -> list[Tensor]:
    """Keys and values of the rows, each (B, H, K, D)."""
    key_rows_BMKC, value_rows_BMKC = projection.split_rows(projection(context_BNC).rows_BMKC)
    keys_BGKD = key_value_features(layer, layer.key, key_rows_BMKC)
    values_BGKD = key_value_features(layer, layer.value, value_rows_BMKC)
    return for_every_head(layer, *projection.finish(keys_BGKD, values_BGKD))


def split_heads(features: Tensor, heads: int) -> Tensor:
    """(B, N, H·D) to (B, H, N, D)."""
    return features.unflatten(-1, (heads, -1)).transpose(1, 2)


def key_value_features(layer: MultiHeadLayer, linear: nn.Module, rows_BMKC: Tensor) -> Tensor:
    """`rows · W + b` for every key-value head, (B, G, K, D); M is 1 (the same rows for all) or G (rows for each)."""
    features_BMKGD = linear(rows_BMKC).unflatten(-1, (layer.num_kv_heads, layer.head_dim))
    if rows_BMKC.shape[1] == 1:
        return features_BMKGD[:, 0].transpose(1, 2)
    return features_BMKGD.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def for_every_head(layer: MultiHeadLayer, *features_BGKD: Tensor) -> list[Tensor]:
    """(B, G, K, D) to (B, H, K, D), for keys and values."""
    group = layer.num_heads // layer.num_kv_heads
    return [features.repeat_interleave(group, dim=1) for features in features_BGKD]
