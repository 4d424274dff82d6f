"""Process groups and the few verbs that attention communicates with.

``world = data axis x ring axis``. Ranks of a ring are consecutive, so that a ring of a node's size stays inside the node, and so
are those of an inner ring. All ranks of a ring call the same verbs in the same order; transfers of keys and of gradients carry
their own tags, and those between nodes run in groups of their own, so that they do not queue behind those within.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.plan import Transfer

TAG_KV, TAG_DKV, TAG_KV_AHEAD, TAG_DKV_AHEAD = 1, 2, 3, 4


@dataclass(frozen=True)
class Axes:
    """The two axes and this process's place on them. Groups are None for an axis of size 1.

    ``inner_size``: ranks of an inner ring, None for a flat ring; only then there are an inner and an outer group.
    """

    world_size: int
    rank: int
    ring_size: int
    ring_group: Any = None
    data_group: Any = None
    inner_size: int | None = None
    inner_group: Any = None
    outer_group: Any = None

    @property
    def ring_rank(self) -> int:
        """Place on the ring axis."""
        return self.rank % self.ring_size

    @property
    def data_size(self) -> int:
        """Rings that work on different sequences."""
        return self.world_size // self.ring_size

    @property
    def data_rank(self) -> int:
        """Place on the data axis."""
        return self.rank // self.ring_size

    @classmethod
    def create(cls, config: SparseRingConfig) -> Axes:
        """Build the groups for the configuration's degree; every rank of the world calls it.

        Raises:
            SparseRingError: the degree does not divide the world.
        """
        if not dist.is_initialized():
            if config.degree not in (None, 1):
                raise SparseRingError(
                    f"sparse_ring.degree is {config.degree}, but torch.distributed is not initialised: start with the deepspeed "
                    "launcher and call deepspeed.init_distributed() first, or set degree to 1"
                )
            config.check_degree(1)
            return cls(1, 0, 1)
        world, rank = dist.get_world_size(), dist.get_rank()
        ring = config.check_degree(world)
        ring_group = data_group = None
        for first in range(0, world, ring):  # every rank creates every group, in the same order
            group = dist.new_group(list(range(first, first + ring))) if ring > 1 else None
            ring_group = group if first <= rank < first + ring else ring_group
        for offset in range(ring):
            group = dist.new_group(list(range(offset, world, ring))) if ring < world else None
            data_group = group if rank % ring == offset else data_group
        axes = cls(world, rank, ring, ring_group, data_group)
        return axes if config.inner_degree is None else axes._with_inner_rings(config.inner_degree)

    def _with_inner_rings(self, size: int) -> Axes:
        """Groups within inner rings of ``size`` ranks, and of counterparts in the inner rings of a ring."""
        inner_group = outer_group = None
        for first in range(0, self.world_size, self.ring_size):
            for node in range(first, first + self.ring_size, size):
                group = dist.new_group(list(range(node, node + size)))
                inner_group = group if node <= self.rank < node + size else inner_group
            for place in range(first, first + size):
                members = list(range(place, first + self.ring_size, size))
                group = dist.new_group(members)
                outer_group = group if self.rank in members else outer_group
        return replace(self, inner_size=size, inner_group=inner_group, outer_group=outer_group)

    def world_totals(self, values: list[float]) -> list[float]:
        """Sums of host numbers over all ranks."""
        if self.world_size == 1:
            return values
        nccl = dist.get_backend() == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        totals = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(totals)
        return totals.tolist()

    def world_sum(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def ring_sum(self, x: Tensor) -> Tensor:
        """Sum over the ring, in place; every rank gets the same bits."""
        if self.ring_size > 1:
            dist.all_reduce(x, group=self.ring_group)
        return x

    def ring_max(self, x: Tensor) -> Tensor:
        """Maximum over the ring, in place."""
        if self.ring_size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.ring_group)
        return x

    def ring_gather(self, x: Tensor) -> list[Tensor]:
        """Tensors of one shape and dtype from all ranks of the ring, in ring order."""
        if self.ring_size == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.ring_size)]
        dist.all_gather(parts, x.contiguous(), group=self.ring_group)
        return parts

    def ring_gather_rows(self, x: Tensor) -> Tensor:
        """Concatenation over the ring of ``[rows, ...]`` tensors whose row counts differ."""
        if self.ring_size == 1:
            return x
        counts = [int(c) for c in self.ring_gather(torch.tensor([x.shape[0]], device=x.device))]
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: x.shape[0]] = x
        return torch.cat([part[:count] for part, count in zip(self.ring_gather(padded), counts, strict=True)])

    def exchange(self, x: Tensor, transfer: Transfer | None, tag: int) -> Exchange:
        """Start passing ``x`` on along the ring; ``wait()`` gives what arrives. Nothing happens for ``transfer`` None."""
        if transfer is None:
            return Exchange(None, [], x)
        received = torch.empty_like(x)
        first = self.rank - self.ring_rank
        group = self.ring_group
        if self.inner_size is not None:
            group = self.inner_group if transfer.level == "inner" else self.outer_group
        operations = [
            dist.P2POp(dist.isend, x, first + transfer.send_to, group, tag),
            dist.P2POp(dist.irecv, received, first + transfer.receive_from, group, tag),
        ]
        return Exchange(received, dist.batch_isend_irecv(operations), x)


class Exchange:
    """A transfer under way. It holds the buffer being sent until the transfer is over."""

    def __init__(self, received: Tensor | None, works: list[Any], sent: Tensor) -> None:
        self._result = sent if received is None else received
        self._works, self._sent = works, [sent]

    def wait(self) -> Tensor:
        """What arrived, as often as asked; without a transfer, the tensor that was given."""
        while self._works:
            self._works.pop().wait()
        self._sent.clear()
        return self._result
