"""Process groups and the few verbs that attention communicates with.

``world = data axis x sequence axis``, and the sequence axis is ``ring x Ulysses``. Ranks that share a sequence are consecutive,
and among them those of a Ulysses group, which exchange heads for tokens all at once; then come those of an inner ring. All
ranks of a group call the same verbs in the same order; transfers of keys and of gradients carry their own tags, and those
between nodes run in groups of their own, so that they do not queue behind those within.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.plan import InnerKind, Transfer

TAG_KV, TAG_DKV, TAG_KV_AHEAD, TAG_DKV_AHEAD, TAG_ULYSSES = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Axes:
    """The axes and this process's place on them. Groups are None for an axis of size 1.

    Attributes:
        sequence_size: ranks that share a sequence. ulysses_size: those of them that exchange heads for tokens.
        inner_size: ranks of an inner ring, None for a flat ring; only otherwise there are an inner and an outer group.
        inner_kind: whether keys and values turn in an inner ring or are gathered at once.
    """

    world_size: int
    rank: int
    sequence_size: int
    ulysses_size: int = 1
    sequence_group: Any = None
    ring_group: Any = None
    ulysses_group: Any = None
    data_group: Any = None
    inner_size: int | None = None
    inner_kind: InnerKind = "ring"
    inner_group: Any = None
    outer_group: Any = None

    @property
    def sequence_rank(self) -> int:
        """Place on the sequence axis."""
        return self.rank % self.sequence_size

    @property
    def ring_size(self) -> int:
        """Ranks of the ring."""
        return self.sequence_size // self.ulysses_size

    @property
    def ring_rank(self) -> int:
        """Place in the ring."""
        return self.sequence_rank // self.ulysses_size

    @property
    def ulysses_rank(self) -> int:
        """Place in the Ulysses group."""
        return self.sequence_rank % self.ulysses_size

    @property
    def layout_rank(self) -> int:
        """Whose part of the striped layout this process holds: a Ulysses group together has every ring_size-th block."""
        return self.ring_rank + self.ulysses_rank * self.ring_size

    @property
    def data_size(self) -> int:
        """Sequences that are worked on at once."""
        return self.world_size // self.sequence_size

    @property
    def data_rank(self) -> int:
        """Place on the data axis."""
        return self.rank // self.sequence_size

    @classmethod
    def create(cls, config: SparseRingConfig) -> Axes:
        """Build the groups for the configuration's degrees; every rank of the world calls it.

        Raises:
            SparseRingError: the degrees do not divide the world.
        """
        if not dist.is_initialized():
            if config.degree not in (None, 1):
                raise SparseRingError(
                    f"sparse_ring.degree is {config.degree}, but torch.distributed is not initialised: start with the deepspeed "
                    "launcher and call deepspeed.init_distributed() first, or set degree to 1"
                )
            config.check_degree(1)
            return cls(1, 0, 1)
        world, rank, ulysses, inner = dist.get_world_size(), dist.get_rank(), config.ulysses_degree, config.inner_degree
        size = config.check_degree(world)
        sequences = [list(range(first, first + size)) for first in range(0, world, size)]
        rings = [members[place::ulysses] for members in sequences for place in range(ulysses)]
        within = [members[at : at + ulysses] for members in sequences for at in range(0, size, ulysses)]
        hierarchical = inner is not None
        nodes = [ring[at : at + inner] for ring in rings for at in range(0, len(ring), inner)] if inner is not None else []
        across = [ring[place::inner] for ring in rings for place in range(inner)] if inner is not None else []
        return cls(
            world,
            rank,
            size,
            ulysses,
            sequence_group=_own_group(sequences, rank),
            ring_group=_own_group(rings, rank, urgent=True),
            ulysses_group=_own_group(within, rank),
            data_group=_own_group([list(range(place, world, size)) for place in range(size)], rank),
            inner_size=inner,
            inner_kind=config.inner,
            inner_group=_own_group(nodes, rank, urgent=True) if hierarchical else None,
            outer_group=_own_group(across, rank, urgent=True) if hierarchical else None,
        )

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

    def sequence_gather(self, x: Tensor) -> list[Tensor]:
        """Tensors of one shape and dtype from all ranks that share a sequence, in the order of the layout."""
        if self.sequence_size == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.sequence_size)]
        dist.all_gather(parts, x.contiguous(), group=self.sequence_group)
        return [parts[ring * self.ulysses_size + place] for place in range(self.ulysses_size) for ring in range(self.ring_size)]

    def all_to_all(self, x: Tensor) -> Tensor:
        """Within the Ulysses group: ``x[i]`` goes to rank i, and ``out[i]`` comes from it. ``[ulysses_size, ...]``."""
        if self.ulysses_size == 1:
            return x
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        if dist.get_backend(self.ulysses_group) == "nccl":
            dist.all_to_all_single(out, x, group=self.ulysses_group)
            return out
        out[self.ulysses_rank] = x[self.ulysses_rank]
        first = self.rank - self.ulysses_rank
        peers = [i for i in range(self.ulysses_size) if i != self.ulysses_rank]
        operations = [
            dist.P2POp(operation, buffer[i], first + i, self.ulysses_group, TAG_ULYSSES)
            for i in peers
            for operation, buffer in ((dist.isend, x), (dist.irecv, out))
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return out

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
        return self.exchange_all(x, [transfer], tag)[0] if transfer is not None else Exchange(None, [], x)

    def exchange_all(self, x: Tensor, transfers: Sequence[Transfer], tag: int) -> list[Exchange]:
        """Start passing ``x`` on to several ranks of one level at once: one launch of NCCL, and all end together."""
        if not transfers:
            return []
        first, step = self.rank - self.ring_rank * self.ulysses_size, self.ulysses_size
        group = self.ring_group
        if self.inner_size is not None:
            group = self.inner_group if transfers[0].level == "inner" else self.outer_group
        received = [torch.empty_like(x) for _ in transfers]
        operations = [
            dist.P2POp(operation, buffer, first + peer * step, group, tag)
            for transfer, into in zip(transfers, received, strict=True)
            for operation, buffer, peer in ((dist.isend, x, transfer.send_to), (dist.irecv, into, transfer.receive_from))
        ]
        works = dist.batch_isend_irecv(operations)
        return [Exchange(into, works, x) for into in received]


class Exchange:
    """A transfer under way. It holds the buffer being sent until the transfer, and those posted with it, are over."""

    def __init__(self, received: Tensor | None, works: list[Any], sent: Tensor) -> None:
        self._result = sent if received is None else received
        self._works, self._sent = works, [sent]

    def wait(self) -> Tensor:
        """What arrived, as often as asked; without a transfer, the tensor that was given."""
        while self._works:
            self._works.pop().wait()
        self._sent.clear()
        return self._result


def _own_group(groups: list[list[int]], rank: int, *, urgent: bool = False) -> Any:
    """Create all groups of more than one rank, in the same order on every rank; the one that this rank is in.

    Args:
        urgent: its transfers hide behind attention, whose programs are many and short. On NCCL they run on a stream of high
            priority, so that the next multiprocessors that become free are theirs. Otherwise they would begin when every
            program launched before has begun: after the hop, not during it.
    """
    own = None
    for members in groups:
        group = dist.new_group(members, pg_options=_high_priority() if urgent else None) if len(members) > 1 else None
        own = group if rank in members else own
    return own


def _high_priority() -> Any:
    """Options of a new group, new for each: torch writes the group's name into them. Builds without NCCL lack the class."""
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if dist.get_backend() == "nccl" else None
