"""Exchange of heads for tokens within a Ulysses group (DeepSpeed-Ulysses, arXiv 2309.14509).

The u ranks of a group hold consecutive parts of one shard of the layout over the ring. Before attention each of them gets a
share of the heads for that whole shard; after it the heads come back. With fewer KV heads than ranks, each KV head goes to
several of them, and its gradients are summed, in the order of the ranks and in the accumulator's dtype.

Layers that work on chunks of their tokens exchange these chunk by chunk (`ChunkExchange`): one is under way while the next one
is computed.

Shapes: H heads, n local tokens, c of a chunk, D head size, u ranks of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ds_sparse_ring.comm import Arrival, Axes, Place
from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.meter import Meter


def to_heads(tensors: Sequence[Tensor], axes: Axes, place: Place | None = None, meter: Meter | None = None) -> list[Tensor]:
    """``[H, n, D]`` of all heads -> ``[H / u, u n, D]`` of this rank's heads, ``[1, u n, D]`` if there are fewer than u.

    Args:
        place: for messages, as below. meter: is told the bytes that are sent, as below.
    """
    if axes.ulysses_size == 1:
        return list(tensors)
    received = _swap([_shares_of_heads(x, axes.ulysses_size) for x in tensors], axes, place, meter).wait()
    return [torch.stack(of, 1).flatten(1, 2) for of in received]


def to_tokens(
    tensors: Sequence[Tensor], axes: Axes, heads: Sequence[int], place: Place | None = None, meter: Meter | None = None
) -> list[Tensor]:
    """The inverse of `to_heads`: ``[H / u, u n, D]`` -> ``[heads, n, D]``.

    Heads that several ranks had are summed, and then come in the accumulator's dtype.
    """
    size = axes.ulysses_size
    if size == 1:
        return list(tensors)
    received = _swap([x.chunk(size, 1) for x in tensors], axes, place, meter).wait()
    return [_of_all_ranks(of, count) for of, count in zip(received, heads, strict=True)]


@dataclass(frozen=True)
class ChunkExchange:
    """Heads for tokens, a chunk of tokens at a time: each is under way while the caller computes the next one.

    Attributes:
        axes: whose Ulysses group exchanges; of one rank, nothing is sent.
        chunks: ranges of the n local tokens in their order, the same on all ranks of the group.
        meter: is told what the device waits for, and what is sent.
        layer, backward: for messages.
    """

    axes: Axes
    chunks: Sequence[slice]
    meter: Meter
    layer: int
    backward: bool = False

    def to_heads(self, parts: Iterable[Sequence[Tensor]]) -> list[Tensor]:
        """Chunks ``[H, c, D]`` of all heads, one tuple of tensors after the other -> wholes as of the function `to_heads`."""
        wholes: list[Tensor] = []
        before: tuple[slice, Arrival[list[list[Tensor]]]] | None = None
        for number, (tokens, part) in enumerate(zip(self.chunks, parts, strict=True)):
            shares = [_shares_of_heads(x, self.axes.ulysses_size) for x in part]
            swap = _swap(shares, self.axes, self._at(number), self.meter)
            if not wholes:
                wholes = [self._whole(of[0]) for of in shares]
            del shares  # the exchange holds them as long as it must
            if before is not None:
                self._place(wholes, *before)
            before = tokens, swap
        assert before is not None
        self._place(wholes, *before)
        return wholes

    def to_tokens(self, wholes: Sequence[Tensor], heads: Sequence[int]) -> Iterator[list[Tensor]]:
        """The inverse: chunks ``[heads, c, D]`` as of the function `to_tokens`, the next one under way meanwhile."""
        swap = self._shares(wholes, 0)
        for following in range(1, len(self.chunks) + 1):
            arrived = swap
            if following < len(self.chunks):
                swap = self._shares(wholes, following)
            yield [_of_all_ranks(of, count) for of, count in zip(self._wait(arrived), heads, strict=True)]

    def _whole(self, share: Tensor) -> Tensor:
        return share.new_empty(share.shape[0], self.axes.ulysses_size * self.chunks[-1].stop, share.shape[2])

    def _place(self, wholes: Sequence[Tensor], tokens: slice, swap: Arrival[list[list[Tensor]]]) -> None:
        for whole, of in zip(wholes, self._wait(swap), strict=True):
            for place, x in zip(whole.chunk(len(of), 1), of, strict=True):
                place[:, tokens].copy_(x)

    def _shares(self, wholes: Sequence[Tensor], number: int) -> Arrival[list[list[Tensor]]]:
        size, tokens = self.axes.ulysses_size, self.chunks[number]
        shares = [[x[:, tokens] for x in whole.chunk(size, 1)] for whole in wholes]
        return _swap(shares, self.axes, self._at(number), self.meter)

    def _at(self, number: int) -> Place:
        return Place(self.layer, self.backward, chunk=number)

    def _wait(self, swap: Arrival[list[list[Tensor]]]) -> list[list[Tensor]]:
        if self.axes.ulysses_size == 1:
            return swap.wait()
        with self.meter.timed("attention"), self.meter.timed("heads"):
            return swap.wait()


def _swap(
    shares: Sequence[Sequence[Tensor]], axes: Axes, place: Place | None, meter: Meter | None
) -> Arrival[list[list[Tensor]]]:
    """`Axes.swap_shares`, counted."""
    swap = axes.swap_shares(shares, place)
    if meter is not None:
        meter.count("sent_heads_bytes", swap.sent_bytes)
    return swap


def _shares_of_heads(x: Tensor, ranks: int) -> list[Tensor]:
    """``[H, n, D]`` -> each rank's ``[H / u, n, D]``; of fewer heads than ranks, some get the same ``[1, n, D]``."""
    shares, same = x.chunk(min(ranks, x.shape[0])), max(1, ranks // x.shape[0])
    return [share for part in shares for share in [part if same == 1 else part.contiguous()] * same]


def _of_all_ranks(shares: Sequence[Tensor], heads: int) -> Tensor:
    """Each rank's ``[H / u, n, D]`` -> ``[heads, n, D]``, of a head that some ranks had the sum."""
    same = len(shares) * shares[0].shape[0] // heads
    if same > 1:
        wide = [x.to(accumulator_dtype(x.dtype)) for x in shares]
        shares = [reduce(torch.add, wide[first : first + same]) for first in range(0, len(wide), same)]
    return torch.cat(list(shares)) if len(shares) > 1 else shares[0]
