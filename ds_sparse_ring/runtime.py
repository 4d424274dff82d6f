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
from ds_sparse_ring.config import PricedSelector, SparseRingConfig
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.kernels import get_kernel
from ds_sparse_ring.ladder import KeptBytes, Ladder, make_ladder
from ds_sparse_ring.layout import LayoutKind
from ds_sparse_ring.meter import Meter
from ds_sparse_ring.same_section import check_same_section
from ds_sparse_ring.schedule import Schedule
from ds_sparse_ring.spill import Graph, Spill


class SparseRing:
    """The running job's sparse ring.

    Attributes:
        config: the ``"sparse_ring"`` section. axes: process groups and this rank's place.
        step: optimizer steps done; the training loop sets it, on all ranks the same. The schedule goes by it.
        schedule: what layers choose by in a step; the section's ``"schedule"``, ``"dense_layers"`` and warm-up.
        spill: where checkpointed layers keep what they need again, with an ``"offload"`` section.
        ranks_on_host: ranks of this machine.
        evaluating: True during evaluation; ``eval_full_index`` acts on it.
        sequence: the ``sparse_ring`` entry of the micro-batch that is worked on, forward and backward. The training loop sets it
            for models that cannot pass the entry down to their attention; the others leave it alone.
    """

    def __init__(self, config: SparseRingConfig) -> None:
        """Create the process groups; every rank of the world calls it, after ``deepspeed.init_distributed()``.

        Raises:
            SparseRingError: a degree that does not divide the world, a backend that does not run here, or ranks whose sections
                differ.
        """
        check_same_section(config)
        self.config = config
        self.axes = Axes.create(config)
        self.schedule = Schedule(config, self.axes)
        self.kernel = get_kernel(config.backend, spare_multiprocessors=config.spare_multiprocessors)
        self._meters = {False: Meter(self.axes, config.maps), True: Meter(self.axes)}
        self.ranks_on_host = min(self.axes.world_size, torch.cuda.device_count() or self.axes.world_size)
        offload = config.offload
        self.spill = Spill(offload, lambda name: self.meter.timed(name), self.ranks_on_host) if offload is not None else None
        self.step = 0
        self.evaluating = False
        self.sequence: Sequence | None = None
        self._positions: tuple[Sequence, Tensor] | None = None
        self._graph: tuple[Sequence, Graph] | None = None
        self._ladder: Ladder | None = None  # the last one, which is printed when it is the first

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseRing:
        return self  # a copied model belongs to the same ring; process groups cannot be copied

    @classmethod
    def from_deepspeed(cls, source: str | Path | Mapping[str, Any]) -> SparseRing:
        """From a DeepSpeed configuration: the path of its JSON file or the mapping itself."""
        return cls(SparseRingConfig.from_deepspeed(source))

    @property
    def meter(self) -> Meter:
        """Attention metrics of the current phase: training and evaluation are counted apart."""
        return self._meters[self.evaluating]

    def note_layers(self, count: int) -> None:
        """Say how many layers the model has: attention maps are recorded of the first one, the one in the middle and the last."""
        for meter in self._meters.values():
            meter.model_layers = count

    def sequence_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch that all ranks of its ring hold in full; see `ds_sparse_ring.batch.shard_batch`."""
        return self._sharder()(batch)

    def collator(self, inner: Callable[[list[Any]], Mapping[str, Any]]) -> Callable[[list[Any]], dict[str, Any]]:
        """A collator that collates with ``inner`` and takes this rank's part; it pickles, so loader workers can run it."""
        return ShardingCollator(inner, self._sharder())

    def _sharder(self) -> Sharder:
        axes = self.axes
        return Sharder(
            self.config.layout, axes.sequence_size, axes.sequence_rank, self.config.segment_tokens, group=axes.ulysses_size
        )

    def count_targets(self, batches: Iterable[Mapping[str, Any]]) -> Tensor:
        """Valid targets of local batches, summed over batches and all ranks: int64 scalar. Collective over the world.

        Raises:
            SparseRingError: no batch, or one without labels, whose model would give no loss.
        """
        batches = list(batches)
        if not batches or any("shift_labels" not in batch for batch in batches):
            lacking = [i for i, batch in enumerate(batches) if "shift_labels" not in batch]
            what = f"batches {lacking} of {len(batches)} have none" if lacking else "none was given"
            raise SparseRingError(
                f"count_targets: needs batches with labels, but {what}: make them by SparseRing.sequence_batch from 'input_ids' "
                "and 'labels'"
            )
        counts = [(batch["shift_labels"] != IGNORE).sum() for batch in batches]
        return self.axes.world_sum(torch.stack(counts).sum())

    def gather(self, x: Tensor, sequence: Sequence) -> Tensor:
        """``[1, n, ...]`` of every rank of the ring -> ``[B, S, ...]`` of the original batch. Collective over the ring.

        Raises:
            SparseRingError: another number of tokens than the sequence has on this rank.
        """
        if x.dim() < 2 or x.shape[0] != 1 or x.shape[1] != sequence.layout.local_tokens:
            raise SparseRingError(
                f"gather: a tensor {tuple(x.shape)} is no part of this sequence, whose parts have {sequence.layout.local_tokens} "
                "tokens: give [1, tokens, ...], as the model returns it for the batch of SparseRing.sequence_batch"
            )
        parts = self.axes.sequence_gather(x[0].contiguous())
        return sequence.restore(sequence.layout.unshard(parts))

    def positions(self, sequence: Sequence, device: torch.device) -> Tensor:
        """`Sequence.positions` on ``device``, int64 ``[n]``; copied there once for all layers of a micro-batch."""
        if self._positions is None or self._positions[0] is not sequence or self._positions[1].device != device:
            places = sequence.positions()
            places = places.pin_memory() if device.type == "cuda" else places  # or the host would wait for the device
            self._positions = sequence, places.to(device, non_blocking=True)
        return self._positions[1]

    def bind(self, sequence: Sequence, *, heads_exchanged: bool = False, layers: KeptBytes | None = None) -> SequenceContext:
        """The context that attention takes, for a batch's ``sparse_ring`` entry.

        Args:
            heads_exchanged: see `SequenceContext`.
            layers: what each of them keeps of a token in the forward pass that begins; None: not known, nor that one begins.

        Raises:
            SparseRingError: the batch was sharded for another ring, rank or layout; inputs of layers that no tier has room for.
        """
        layout = sequence.layout
        sharded = (layout.kind, layout.ranks, layout.group, sequence.rank)
        expected = (self.config.layout, self.axes.sequence_size, self.axes.ulysses_size, self.axes.sequence_rank)
        if sharded != expected:
            raise SparseRingError(
                f"batch: it was sharded as (layout, ranks, Ulysses group, rank) = {sharded}, this ring is "
                f"{expected}: shard it with the collator of the ring that the model is attached to"
            )
        step = self.schedule.evaluation(self.step) if self.evaluating else self.schedule.training(self.step)
        self.meter.notes = {"price": step.selector.price} if isinstance(step.selector, PricedSelector) else {}
        return SequenceContext(
            layout=layout.over_groups(),
            segments=sequence.segments,
            axes=self.axes,
            config=self.config,
            selector=step.selector,
            kernel=self.kernel,
            meter=self.meter,
            spill=self._kept_by(sequence, layers),
            heads_exchanged=heads_exchanged,
            step=step,
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the ring, as JSON takes it: prices that have moved. Collective, between two steps."""
        return self.schedule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint has kept, on every rank."""
        self.schedule.load_state_dict(state)

    def ladder(self, sequence: Sequence, layers: KeptBytes) -> Ladder | None:
        """Where layers keep what a sequence's backward pass needs; None without an ``"offload"`` section.

        Raises:
            SparseRingError: inputs that no tier has room for.
        """
        if self.spill is None:
            return None
        tokens = sequence.layout.over_groups().local_tokens // self.axes.ulysses_size
        ladder = make_ladder(layers, tokens, self.spill.budgets, keep_outputs=self.config.checkpoint == "output")
        if self._ladder is None and self.axes.rank == 0:
            print("\n".join(ladder.lines()), flush=True)
        self._ladder = ladder
        return ladder

    def _kept_by(self, sequence: Sequence, layers: KeptBytes | None) -> Graph | None:
        """Of the pass that begins, or of the one that works on the sequence."""
        if self.spill is None:
            return None
        if layers is not None:
            return self.spill.graph(self.ladder(sequence, layers))
        if self._graph is None or self._graph[0] is not sequence:
            self._graph = sequence, self.spill.graph()
        return self._graph[1]


@dataclass(frozen=True)
class Sharder:
    """`shard_batch` for one place in one layout."""

    kind: LayoutKind
    ranks: int
    rank: int
    segment_tokens: int | None
    group: int = 1

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        place: dict[str, Any] = {"kind": self.kind, "ranks": self.ranks, "rank": self.rank, "group": self.group}
        return shard_batch(batch, **place, segment_tokens=self.segment_tokens)


@dataclass(frozen=True)
class ShardingCollator:
    """Collates, then shards."""

    inner: Callable[[list[Any]], Mapping[str, Any]]
    sharder: Sharder

    def __call__(self, rows: SequenceOf[Any]) -> dict[str, Any]:
        return self.sharder(self.inner(list(rows)))
