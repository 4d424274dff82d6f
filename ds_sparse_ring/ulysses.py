"""Exchange of heads for tokens within a Ulysses group (DeepSpeed-Ulysses, arXiv 2309.14509).

The u ranks of a group hold consecutive parts of one shard of the layout over the ring. Before attention each of them gets a
share of the heads for that whole shard; after it the heads come back. With fewer KV heads than ranks, each KV head goes to
several of them, and its gradients are summed.

Layers that work on chunks of their tokens exchange these chunk by chunk (`ChunkExchange`): one is under way while the next one
is computed.

Shapes: H heads, n local tokens, c of a chunk, D head size, u ranks of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_sparse_ring.comm import Arrival, Axes, Place
from ds_sparse_ring.meter import Meter


def to_heads(tensors: Sequence[Tensor], axes: Axes, place: Place | None = None) -> list[Tensor]:
    """``[H, n, D]`` of all heads -> ``[H / u, u n, D]`` of this rank's heads, ``[1, u n, D]`` if there are fewer than u.

    Args:
        place: for messages, as below.
    """
    size = axes.ulysses_size
    if size == 1:
        return list(tensors)
    whole = [x if x.shape[0] >= size else x.repeat_interleave(size // x.shape[0], 0) for x in tensors]
    received = axes.swap_shares([x.chunk(size) for x in whole], place).wait()
    return [torch.stack(of, 1).flatten(1, 2) for of in received]


def to_tokens(tensors: Sequence[Tensor], axes: Axes, heads: Sequence[int], place: Place | None = None) -> list[Tensor]:
    """The inverse of `to_heads`: ``[H / u, u n, D]`` -> ``[heads, n, D]``; heads that several ranks had are summed."""
    size = axes.ulysses_size
    if size == 1:
        return list(tensors)
    received = axes.swap_shares([x.chunk(size, 1) for x in tensors], place).wait()
    whole = [torch.cat(of) for of in received]
    return [x if x.shape[0] == count else x.unflatten(0, (count, -1)).sum(1) for x, count in zip(whole, heads, strict=True)]


@dataclass(frozen=True)
class ChunkExchange:
    """Heads for tokens, a chunk of tokens at a time: each is under way while the caller computes the next one.

    Attributes:
        axes: whose Ulysses group exchanges; of one rank, nothing is sent. KV heads are at least as many as its ranks.
        chunks: ranges of the n local tokens in their order, the same on all ranks of the group.
        meter: is told what the device waits for.
        layer, backward: for messages.
    """

    axes: Axes
    chunks: Sequence[slice]
    meter: Meter
    layer: int
    backward: bool = False

    def to_heads(self, parts: Iterable[Sequence[Tensor]]) -> list[Tensor]:
        """Chunks ``[H, c, D]`` of all heads, one tuple of tensors after the other -> ``[H / u, u n, D]`` of this rank's heads."""
        wholes: list[Tensor] = []
        before: tuple[slice, Arrival[list[list[Tensor]]]] | None = None
        for number, (tokens, part) in enumerate(zip(self.chunks, parts, strict=True)):
            swap = self.axes.swap_shares([x.chunk(self.axes.ulysses_size) for x in part], self._at(number))
            if not wholes:
                wholes = [self._whole(x) for x in part]
            if before is not None:
                self._place(wholes, *before)
            before = tokens, swap
        assert before is not None
        self._place(wholes, *before)
        return wholes

    def to_tokens(self, wholes: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """The inverse: chunks ``[H, c, D]`` of what all ranks have as ``[H / u, u n, D]``, the next one under way meanwhile."""
        swap = self._shares(wholes, 0)
        for following in range(1, len(self.chunks) + 1):
            arrived = swap
            if following < len(self.chunks):
                swap = self._shares(wholes, following)
            yield [torch.cat(of) if len(of) > 1 else of[0] for of in self._wait(arrived)]

    def _whole(self, part: Tensor) -> Tensor:
        size = self.axes.ulysses_size
        return part.new_empty(part.shape[0] // size, size * self.chunks[-1].stop, part.shape[2])

    def _place(self, wholes: Sequence[Tensor], tokens: slice, swap: Arrival[list[list[Tensor]]]) -> None:
        for whole, of in zip(wholes, self._wait(swap), strict=True):
            for place, x in zip(whole.chunk(len(of), 1), of, strict=True):
                place[:, tokens].copy_(x)

    def _shares(self, wholes: Sequence[Tensor], number: int) -> Arrival[list[list[Tensor]]]:
        size, tokens = self.axes.ulysses_size, self.chunks[number]
        return self.axes.swap_shares([[x[:, tokens] for x in whole.chunk(size, 1)] for whole in wholes], self._at(number))

    def _at(self, number: int) -> Place:
        return Place(self.layer, self.backward, chunk=number)

    def _wait(self, swap: Arrival[list[list[Tensor]]]) -> list[list[Tensor]]:
        if self.axes.ulysses_size == 1:
            return swap.wait()
        with self.meter.timed("attention"), self.meter.timed("heads"):
            return swap.wait()
