"""Exchange of heads for tokens within a Ulysses group (DeepSpeed-Ulysses, arXiv 2309.14509), for a striped layout.

The u ranks of a group hold, together, every R-th block of the sequence, R the ranks of the ring: block j of rank i of the group
is their common block ``u j + i``. Before attention each of them gets a share of the heads for all of these blocks; after it the
heads come back. With fewer KV heads than ranks, each KV head goes to several of them, and its gradients are summed.

Shapes: H heads, n local tokens, D head size.
"""

from __future__ import annotations

from torch import Tensor

from ds_sparse_ring.comm import Axes
from ds_sparse_ring.layout import BLOCK


def to_heads(x: Tensor, axes: Axes) -> Tensor:
    """``[H, n, D]`` of all heads -> ``[H / u, u n, D]`` of this rank's heads, ``[1, u n, D]`` if there are fewer than u."""
    size = axes.ulysses_size
    if size == 1:
        return x
    if x.shape[0] < size:
        x = x.repeat_interleave(size // x.shape[0], 0)
    received = axes.all_to_all(x.unflatten(0, (size, -1)))  # [rank, H / u, n, D]
    blocks = received.unflatten(2, (-1, BLOCK))  # [rank, H / u, b, T, D]
    return blocks.permute(1, 2, 0, 3, 4).flatten(1, 3)


def to_tokens(x: Tensor, axes: Axes, heads: int) -> Tensor:
    """The inverse of `to_heads`: ``[H / u, u n, D]`` -> ``[heads, n, D]``; heads that several ranks had are summed."""
    size = axes.ulysses_size
    if size == 1:
        return x
    blocks = x.unflatten(1, (-1, size, BLOCK))  # [H / u, b, rank, T, D]
    received = axes.all_to_all(blocks.permute(2, 0, 1, 3, 4).flatten(2, 3))  # [rank, H / u, n, D]
    whole = received.flatten(0, 1)
    return whole if whole.shape[0] == heads else whole.unflatten(0, (heads, -1)).sum(1)
