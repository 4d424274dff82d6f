"""What attention needs to know about the sequence it works on: one object, passed down as an argument."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from ds_sparse_ring.comm import Axes
from ds_sparse_ring.config import Selector, SparseRingConfig
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.kernels import Kernel
from ds_sparse_ring.layout import BLOCK, Layout
from ds_sparse_ring.meter import Meter
from ds_sparse_ring.plan import RingPlan, ring_plan
from ds_sparse_ring.schedule import Step
from ds_sparse_ring.slots import Latest
from ds_sparse_ring.spill import Graph


@dataclass(frozen=True)
class SequenceContext:
    """A sequence bound to the running job.

    Attributes:
        layout, segments: where the sequence's blocks are in the ring (a Ulysses group counts as one rank of it), and how its
            queries are grouped.
        selector: what chooses the index for this micro-batch (the configured one, or the full index during warm-up).
        meter: where layers report density, recall and work.
        spill: where the checkpointed layers of this pass keep what they need again; None: on the device.
        heads_exchanged: queries, keys and values come as another library, or a layer in chunks, has exchanged them within the
            Ulysses group: this rank's share of the heads, for all tokens of the group in the order of its ranks.
        layer: the layer that attends, of `at_layer`; random patterns differ between layers.
        latest: layer in chunks of this pass, from whose input the next one's can be made again.
        step: what the schedule says about this step; None: every layer chooses by the selector.
    """

    layout: Layout
    segments: tuple[Segment, ...]
    axes: Axes
    config: SparseRingConfig
    selector: Selector
    kernel: Kernel
    meter: Meter
    spill: Graph | None = None
    heads_exchanged: bool = False
    layer: int = 0
    step: Step | None = None
    latest: Latest = field(default_factory=Latest, compare=False)

    def at_layer(self, layer: int) -> SequenceContext:
        """The same sequence for one of the model's layers, with the selector that its step has for it."""
        return replace(self, layer=layer, selector=self.selector if self.step is None else self.step.selector_of(layer))

    def with_group(self, heads: int) -> SequenceContext:
        """The same for a layer with so many query heads per KV head on this rank, if all of them are to share a pattern."""
        if self.config.heads_per_pattern is not None:
            return self
        return replace(self, config=self.config.model_copy(update={"heads_per_pattern": heads}))

    @property
    def heads_per_pattern(self) -> int:
        """Query heads that share one choice."""
        assert self.config.heads_per_pattern is not None, "with_group comes first"
        return self.config.heads_per_pattern

    @property
    def rank(self) -> int:
        """This process's place in the ring."""
        return self.axes.ring_rank

    @property
    def plan(self) -> RingPlan:
        """This process's hops."""
        return ring_plan(self.layout, self.rank, self.axes.inner_size, self.axes.inner_kind, self.page_blocks)

    @property
    def page_blocks(self) -> int | None:
        """Blocks of a page of keys and values in host memory; None: they stay on the device."""
        tokens = self.config.page_tokens
        return None if tokens is None else tokens // BLOCK

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Refuse tensors that do not belong to this sequence (wrong layout, heads that do not divide, a batch dimension).

        Args:
            q: ``[1, H, n, D]``; k, v: ``[1, K, n, D]``.
        """
        share = self.axes.ulysses_size if self.heads_exchanged else 1
        tokens, q_shape, k_shape = self.layout.local_tokens * share // self.axes.ulysses_size, tuple(q.shape), tuple(k.shape)
        if len(q_shape) != 4 or len(k_shape) != 4 or q_shape[0] != 1 or q_shape[2] != tokens or k_shape[2] != tokens:
            raise SparseRingError(
                f"attention: queries {q_shape} and keys {k_shape} do not fit this sequence, whose shard is [1, heads, {tokens}, "
                "head size]: pass the batch that SparseRing.sequence_batch made, unchanged and without a KV cache"
            )
        if v.shape != k.shape or q_shape[3] != k_shape[3] or not q.dtype == k.dtype == v.dtype:
            described = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, k, v))
            raise SparseRingError(
                f"attention: queries, keys and values are {described}; they need one dtype and head size, and keys and values "
                "the same shape"
            )
        self.config.check_heads(q_shape[1] * share, k_shape[1] * share)
