"""What the layers and batches of one job share: configuration, process groups, kernels, metrics.

A job has one `SparseRing`; it is passed on as an argument or held by the model it was attached to, never by a module global,
so two models of one process can have two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_sparse_ring.batch import IGNORE, Sequence, shard_batch
from ds_sparse_ring.comm import Axes
from ds_sparse_ring.config import FullSelector, SparseRingConfig
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.kernels import get_kernel
from ds_sparse_ring.layout import LayoutKind
from ds_sparse_ring.meter import Meter


class SparseRing:
    """The running job's sparse ring.

    Attributes:
        config: the ``"sparse_ring"`` section. axes: process groups and this rank's place.
        step: optimizer steps done; the training loop sets it, dense warm-up ends by it.
        evaluating: True during evaluation; ``eval_full_index`` acts on it.
    """

    def __init__(self, config: SparseRingConfig) -> None:
        """Create the process groups; every rank of the world calls it, after ``deepspeed.init_distributed()``.

        Raises:
            SparseRingError: a degree that does not divide the world, or a backend that does not run here.
        """
        self.config = config
        self.axes = Axes.create(config)
        self.kernel = get_kernel(config.backend)
        self._meters = {evaluating: Meter(self.axes) for evaluating in (False, True)}
        self.step = 0
        self.evaluating = False

    @classmethod
    def from_deepspeed(cls, source: str | Path | Mapping[str, Any]) -> SparseRing:
        """From a DeepSpeed configuration: the path of its JSON file or the mapping itself."""
        return cls(SparseRingConfig.from_deepspeed(source))

    @property
    def meter(self) -> Meter:
        """Attention metrics of the current phase: training and evaluation are counted apart."""
        return self._meters[self.evaluating]

    def sequence_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch that all ranks of its ring hold in full; see `ds_sparse_ring.batch.shard_batch`."""
        return self._sharder()(batch)

    def collator(self, inner: Callable[[list[Any]], Mapping[str, Any]]) -> Callable[[list[Any]], dict[str, Any]]:
        """A collator that collates with ``inner`` and takes this rank's part; it pickles, so loader workers can run it."""
        return ShardingCollator(inner, self._sharder())

    def _sharder(self) -> Sharder:
        return Sharder(self.config.layout, self.axes.sequence_size, self.axes.layout_rank, self.config.segment_tokens)

    def count_targets(self, batches: Iterable[Mapping[str, Any]]) -> Tensor:
        """Valid targets of local batches, summed over batches and all ranks: int64 scalar. Collective over the world."""
        counts = [(batch["shift_labels"] != IGNORE).sum() for batch in batches if "shift_labels" in batch]
        if not counts:
            raise SparseRingError("count_targets: no batch with labels was given; make batches from 'input_ids' and 'labels'")
        return self.axes.world_sum(torch.stack(counts).sum())

    def gather(self, x: Tensor, sequence: Sequence) -> Tensor:
        """``[1, n, ...]`` of every rank of the ring -> ``[B, S, ...]`` of the original batch. Collective over the ring."""
        parts = self.axes.sequence_gather(x[0].contiguous())
        return sequence.restore(sequence.layout.unshard(parts))

    def bind(self, sequence: Sequence) -> SequenceContext:
        """The context that attention takes, for a batch's ``sparse_ring`` entry.

        Raises:
            SparseRingError: the batch was sharded for another ring, rank or layout.
        """
        layout = sequence.layout
        expected = (self.config.layout, self.axes.sequence_size, self.axes.layout_rank)
        if (layout.kind, layout.ranks, sequence.rank) != expected:
            raise SparseRingError(
                f"batch: it was sharded as (layout, ranks, rank) = {(layout.kind, layout.ranks, sequence.rank)}, this ring is "
                f"{expected}: shard it with the collator of the ring that the model is attached to"
            )
        return SequenceContext(
            layout=layout.over_groups(self.axes.ulysses_size),
            segments=sequence.segments,
            axes=self.axes,
            config=self.config,
            selector=self._selector(),
            kernel=self.kernel,
            meter=self.meter,
        )

    def _selector(self) -> Any:
        warming_up = not self.evaluating and self.step < self.config.dense_warmup_steps
        if warming_up or (self.evaluating and self.config.eval_full_index):
            return FullSelector()
        return self.config.selector


@dataclass(frozen=True)
class Sharder:
    """`shard_batch` for one place in one layout."""

    kind: LayoutKind
    ranks: int
    rank: int
    segment_tokens: int | None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return shard_batch(batch, kind=self.kind, ranks=self.ranks, rank=self.rank, segment_tokens=self.segment_tokens)


@dataclass(frozen=True)
class ShardingCollator:
    """Collates, then shards."""

    inner: Callable[[list[Any]], Mapping[str, Any]]
    sharder: Sharder

    def __call__(self, rows: SequenceOf[Any]) -> dict[str, Any]:
        return self.sharder(self.inner(list(rows)))
