"""Exchange of heads for tokens within a Ulysses group (DeepSpeed-Ulysses, arXiv 2309.14509).

The u ranks of a group hold consecutive parts of one shard of the layout over the ring. Before attention each of them gets a
share of the heads for that whole shard; after it the heads come back. With fewer KV heads than ranks, each KV head goes to
several of them, and its gradients are summed.

Shapes: H heads, n local tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_sparse_ring.comm import Axes


def to_heads(tensors: Sequence[Tensor], axes: Axes) -> list[Tensor]:
    """``[H, n, D]`` of all heads -> ``[H / u, u n, D]`` of this rank's heads, ``[1, u n, D]`` if there are fewer than u."""
    size = axes.ulysses_size
    if size == 1:
        return list(tensors)
    whole = [x if x.shape[0] >= size else x.repeat_interleave(size // x.shape[0], 0) for x in tensors]
    received = axes.swap_shares([x.chunk(size) for x in whole])
    return [torch.stack(of, 1).flatten(1, 2) for of in received]


def to_tokens(tensors: Sequence[Tensor], axes: Axes, heads: Sequence[int]) -> list[Tensor]:
    """The inverse of `to_heads`: ``[H / u, u n, D]`` -> ``[heads, n, D]``; heads that several ranks had are summed."""
    size = axes.ulysses_size
    if size == 1:
        return list(tensors)
    received = axes.swap_shares([x.chunk(size, 1) for x in tensors])
    whole = [torch.cat(of) for of in received]
    return [x if x.shape[0] == count else x.unflatten(0, (count, -1)).sum(1) for x, count in zip(whole, heads, strict=True)]
