"""Process groups and the few verbs that attention communicates with.

``world = data axis x ring axis``. Ranks of a ring are consecutive, so that a ring of a node's size stays inside the node. All
ranks of a ring call the same verbs in the same order; transfers of keys and of gradients carry their own tags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.plan import Transfer

TAG_KV, TAG_DKV = 1, 2


@dataclass(frozen=True)
class Axes:
    """The two axes and this process's place on them. Groups are None for an axis of size 1."""

    world_size: int
    rank: int
    ring_size: int
    ring_group: Any = None
    data_group: Any = None

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
        return cls(world, rank, ring, ring_group, data_group)

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
        send_to, receive_from = (
            dist.get_global_rank(self.ring_group, peer) for peer in (transfer.send_to, transfer.receive_from)
        )
        operations = [
            dist.P2POp(dist.isend, x, send_to, self.ring_group, tag),
            dist.P2POp(dist.irecv, received, receive_from, self.ring_group, tag),
        ]
        return Exchange(received, dist.batch_isend_irecv(operations), x)


class Exchange:
    """A transfer under way. It holds the buffer being sent until the transfer is over."""

    def __init__(self, received: Tensor | None, works: list[Any], sent: Tensor) -> None:
        self._received, self._works, self._sent = received, works, sent

    def wait(self) -> Tensor:
        """What arrived; without a transfer, the tensor that was given."""
        for work in self._works:
            work.wait()
        return self._sent if self._received is None else self._received
