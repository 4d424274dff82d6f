"""Exchange of heads for tokens within a Ulysses group (DeepSpeed-Ulysses, arXiv 2309.14509).

The u ranks of a group hold consecutive parts of one shard of the layout over the ring. Before attention each of them gets a
share of the heads for that whole shard; after it the heads come back. With fewer KV heads than ranks, each KV head goes to
several of them, and its gradients are summed.

Shapes: H heads, n local tokens, D head size.
"""

from __future__ import annotations

from torch import Tensor

from ds_sparse_ring.comm import Axes


def to_heads(x: Tensor, axes: Axes) -> Tensor:
    """``[H, n, D]`` of all heads -> ``[H / u, u n, D]`` of this rank's heads, ``[1, u n, D]`` if there are fewer than u."""
    size = axes.ulysses_size
    if size == 1:
        return x
    if x.shape[0] < size:
        x = x.repeat_interleave(size // x.shape[0], 0)
    received = axes.all_to_all(x.unflatten(0, (size, -1)))  # [rank, H / u, n, D]
    return received.transpose(0, 1).flatten(1, 2)


def to_tokens(x: Tensor, axes: Axes, heads: int) -> Tensor:
    """The inverse of `to_heads`: ``[H / u, u n, D]`` -> ``[heads, n, D]``; heads that several ranks had are summed."""
    size = axes.ulysses_size
    if size == 1:
        return x
    received = axes.all_to_all(x.unflatten(1, (size, -1)).transpose(0, 1))  # [rank, H / u, n, D]
    whole = received.flatten(0, 1)
    return whole if whole.shape[0] == heads else whole.unflatten(0, (heads, -1)).sum(1)
