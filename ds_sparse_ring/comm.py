"""Process groups and the few verbs that attention communicates with.

``world = data axis x sequence axis``, and the sequence axis is ``ring x Ulysses``. Ranks that share a sequence are consecutive,
and among them those of a Ulysses group, which exchange heads for tokens all at once; then come those of an inner ring. All
ranks of a group call the same verbs in the same order; transfers of keys and of gradients carry their own tags, and those
between nodes run in groups of their own, so that they do not queue behind those within.

Nothing waits for ever: with gloo what is late raises here, with an error that names the place; with NCCL, where waiting does not
stop the host, a watch prints the same before NCCL's own watchdog ends the process. Both after the groups' time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.plan import InnerKind, Transfer
from ds_sparse_ring.watch import StreamPlace, TransferWatch

TAG_KV, TAG_DKV, TAG_KV_AHEAD, TAG_DKV_AHEAD, TAG_ULYSSES = 1, 2, 3, 4, 5  # and those behind the last, one a tensor
T = TypeVar("T")
_CARGO = {TAG_KV: "keys and values", TAG_DKV: "their gradients"}
_CARGO |= {TAG_KV_AHEAD: "keys and values for the next round", TAG_DKV_AHEAD: "a round's gradients"}


class Place(NamedTuple):
    """Where in the run a transfer belongs, for messages; ``chunk``: of a layer that works on chunks of its tokens."""

    layer: int
    backward: bool
    hop: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        parts = [f"layer {self.layer}", f"{'backward' if self.backward else 'forward'} pass"]
        return ", ".join(parts + [f"{name} {n}" for name, n in (("hop", self.hop), ("chunk", self.chunk)) if n is not None])


@dataclass(frozen=True)
class Axes:
    """The axes and this process's place on them. Groups are None for an axis of size 1.

    Attributes:
        sequence_size: ranks that share a sequence. ulysses_size: those of them that exchange heads for tokens.
        inner_size: ranks of an inner ring, None for a flat ring; only otherwise there are an inner and an outer group.
        inner_kind: whether keys and values turn in an inner ring or are gathered at once.
        timeout_s: how long an operation of these groups may take. watch: of what these groups do, with NCCL.
    """

    world_size: int
    rank: int
    sequence_size: int
    ulysses_size: int = 1
    sequence_group: Any = None
    ring_group: Any = None
    column_group: Any = None
    ulysses_group: Any = None
    data_group: Any = None
    inner_size: int | None = None
    inner_kind: InnerKind = "ring"
    inner_group: Any = None
    outer_group: Any = None
    timeout_s: float = SparseRingConfig.model_fields["timeout_s"].default
    watch: TransferWatch | None = None

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
        own_group = partial(_own_group, rank=rank, timeout=timedelta(seconds=config.timeout_s))
        return cls(
            world,
            rank,
            size,
            ulysses,
            sequence_group=own_group(sequences),
            ring_group=own_group(rings, urgent=True),
            column_group=own_group(rings, urgent=True),
            ulysses_group=own_group(within, urgent=True),
            data_group=own_group([list(range(place, world, size)) for place in range(size)]),
            inner_size=inner,
            inner_kind=config.inner,
            inner_group=own_group(nodes, urgent=True) if hierarchical else None,
            outer_group=own_group(across, urgent=True) if hierarchical else None,
            timeout_s=config.timeout_s,
            watch=TransferWatch(config.timeout_s) if size > 1 and dist.get_backend() == "nccl" else None,
        )

    def world_totals(self, values: list[float]) -> list[float]:
        """Sums of host numbers over all ranks."""
        return values if self.world_size == 1 else self.world_sum(_host_numbers(values)).tolist()

    def world_rows(self, values: list[float]) -> list[list[float]]:
        """Host numbers of all ranks, as many of each: a list per rank."""
        rows = [0.0] * (self.world_size * len(values))
        rows[self.rank * len(values) : (self.rank + 1) * len(values)] = values
        totals = self.world_totals(rows)
        return [totals[at : at + len(values)] for at in range(0, len(totals), len(values))]

    def ring_largest_and_mean(self, values: list[float]) -> tuple[list[float], list[float]]:
        """Of each of some host numbers, as many on every rank: the largest over the ring, and the mean."""
        if self.ring_size == 1:
            return values, values
        mine = _host_numbers(values)
        largest = self.ring_max(mine.clone())
        return largest.tolist(), (self.ring_sum(mine) / self.ring_size).tolist()

    def world_sum(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.world_size > 1:
            with self._naming("a sum over all ranks", None):
                dist.all_reduce(x)
        return x

    def ring_sum(self, x: Tensor) -> Tensor:
        """Sum over the ring, in place; every rank gets the same bits."""
        if self.ring_size > 1:
            with self._waiting("a sum over the ring", self.ring_group):
                dist.all_reduce(x, group=self.ring_group)
        return x

    def column_gather(self, x: Tensor, place: Place | None = None) -> Arrival[Tensor]:
        """Start gathering ``[m, ...]`` from all ranks of a ring of several, beside its transfers: ``[ring_size * m, ...]``."""
        what, out = _at(place, "gathering columns from the ring"), x.new_empty(self.ring_size * x.shape[0], *x.shape[1:])
        with self._naming(what, self.column_group):
            work = dist.all_gather_into_tensor(out, x, group=self.column_group, async_op=True)
        return self._arrival(out, [work], x, what, self.column_group, (self.ring_size - 1) * x.nbytes)

    def column_shares(self, x: Tensor, place: Place | None = None) -> Arrival[Tensor]:
        """Start a sum over a ring of several ranks of which each gets its share: ``[ring_size * m, ...]`` -> ``[m, ...]``.

        It runs beside the ring's transfers. ``x`` is used up.
        """
        what, share = _at(place, "a sum of columns over the ring"), x.shape[0] // self.ring_size
        with self._naming(what, self.column_group):
            if dist.get_backend(self.column_group) == "nccl":
                out, rounds = x.new_empty(share, *x.shape[1:]), 1
                work = dist.reduce_scatter_tensor(out, x, group=self.column_group, async_op=True)
            else:
                out, rounds = x[self.ring_rank * share : (self.ring_rank + 1) * share], 2
                work = dist.all_reduce(x, group=self.column_group, async_op=True)
        return self._arrival(out, [work], x, what, self.column_group, rounds * (self.ring_size - 1) * out.nbytes)

    def ring_max(self, x: Tensor) -> Tensor:
        """Maximum over the ring, in place."""
        if self.ring_size > 1:
            with self._waiting("a maximum over the ring", self.ring_group):
                dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.ring_group)
        return x

    def ring_gather(self, x: Tensor) -> list[Tensor]:
        """Tensors of one shape and dtype from all ranks of the ring, in ring order."""
        if self.ring_size == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.ring_size)]
        with self._waiting("gathering from the ring", self.ring_group):
            dist.all_gather(parts, x.contiguous(), group=self.ring_group)
        return parts

    def sequence_gather(self, x: Tensor) -> list[Tensor]:
        """Tensors of one shape and dtype from all ranks that share a sequence, in their order."""
        if self.sequence_size == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.sequence_size)]
        with self._waiting("gathering from the ranks of a sequence", self.sequence_group):
            dist.all_gather(parts, x.contiguous(), group=self.sequence_group)
        return parts

    def ulysses_counts(self, count: int, device: torch.device) -> list[int]:
        """A host number of each rank of the Ulysses group, in their order; the host waits for it."""
        if self.ulysses_size == 1:
            return [count]
        parts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.ulysses_size)]
        with self._waiting("counting the heads of a Ulysses group", self.ulysses_group):
            dist.all_gather(parts, torch.tensor([count], device=device), group=self.ulysses_group)
        return torch.cat(parts).tolist()

    def swap_shares(self, shares: Sequence[Sequence[Tensor]], place: Place | None = None) -> Arrival[list[list[Tensor]]]:
        """Start exchanging within the Ulysses group: ``shares[t][r]`` goes to rank r, ``out[t][r]`` comes from it.

        The own share stays as it is. All tensors in one launch. An all-to-all of NCCL would copy the own share, too, half of the
        bytes between two ranks.
        """
        mine, first = self.ulysses_rank, self.rank - self.ulysses_rank
        what = _at(place, "exchanging heads within a Ulysses group")
        sent = [[share.contiguous() if r != mine else share for r, share in enumerate(of)] for of in shares]
        received = [[share if r == mine else share.new_empty(of[mine].shape) for r, share in enumerate(of)] for of in sent]
        operations = [
            dist.P2POp(operation, buffer, first + r, self.ulysses_group, TAG_ULYSSES + t)
            for t, (of, into) in enumerate(zip(sent, received, strict=True))
            for r in range(self.ulysses_size)
            if r != mine
            for operation, buffer in ((dist.isend, of[r]), (dist.irecv, into[r]))
        ]
        if not operations:
            return Arrival(received, [], sent, nullcontext)
        with self._naming(what, self.ulysses_group):
            works = dist.batch_isend_irecv(operations)
        sent_bytes = sum(share.nbytes for of in sent for r, share in enumerate(of) if r != mine)
        return self._arrival(received, works, sent, what, self.ulysses_group, sent_bytes)

    def ring_gather_rows(self, x: Tensor, counts: list[int] | None = None) -> Tensor:
        """Concatenation over the ring of ``[rows, ...]`` tensors whose row counts differ; the host waits for counts not given."""
        if self.ring_size == 1:
            return x
        if counts is None:
            counts = torch.cat(self.ring_gather(torch.tensor([x.shape[0]], device=x.device))).tolist()
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: x.shape[0]] = x
        return torch.cat([part[:count] for part, count in zip(self.ring_gather(padded), counts, strict=True)])

    def exchange(self, x: Tensor, transfer: Transfer | None, tag: int, place: Place) -> Exchange:
        """Start passing ``x`` on along the ring; ``wait()`` gives what arrives. Nothing happens for ``transfer`` None."""
        return self.exchange_all(x, [transfer], tag, place)[0] if transfer is not None else Exchange(None, [], x)

    def exchange_all(self, x: Tensor, transfers: Sequence[Transfer], tag: int, place: Place) -> list[Exchange]:
        """Start passing ``x`` on to several ranks of one level at once: one launch of NCCL, and all end together."""
        if not transfers:
            return []
        first, step = self.rank - self.ring_rank * self.ulysses_size, self.ulysses_size
        to = [first + transfer.send_to * step for transfer in transfers]
        sources = [first + transfer.receive_from * step for transfer in transfers]
        group = self.ring_group
        if self.inner_size is not None:
            group = self.inner_group if transfers[0].level == "inner" else self.outer_group
        received = [torch.empty_like(x) for _ in transfers]
        operations = [
            dist.P2POp(operation, buffer, peer, group, tag)
            for send_to, receive_from, into in zip(to, sources, received, strict=True)
            for operation, buffer, peer in ((dist.isend, x, send_to), (dist.irecv, into, receive_from))
        ]
        describe = partial(self._broken_transfer, place, tag, to, sources)
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:  # gloo: a peer is gone already
            raise SparseRingError(describe(f"could not begin ({error})")) from error
        if self.watch is not None:
            self.watch.add(works[-1], describe)
        return [Exchange(into, works, x, describe) for into in received]

    def _broken_transfer(self, place: Place, tag: int, to: list[int], sources: list[int], what_happened: str) -> str:
        return (
            f"rank {self.rank}: {place}: {_CARGO[tag]} to {_ranks(to)} and from {_ranks(sources)} {what_happened}. "
            + _what_to_look_at(sorted({*to, *sources}))
        )

    @contextmanager
    def _naming(self, what: str, group: Any) -> Iterator[None]:
        """Say what failed, between which ranks, if an operation of a group takes too long or breaks."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise SparseRingError(self._broken_operation(what, group, f"did not get through ({error})")) from error

    @contextmanager
    def _waiting(self, what: str, group: Any) -> Iterator[None]:
        """`_naming` of an operation that is waited for at once: by the host, or with NCCL by the current stream."""
        with self._naming(what, group):
            yield
        if self.watch is not None:
            self.watch.add(StreamPlace(), partial(self._broken_operation, what, group))

    def _arrival(self, result: T, works: list[Any], given: object, what: str, group: Any, sent_bytes: int) -> Arrival[T]:
        entry = None if self.watch is None else self.watch.add(works[-1], partial(self._broken_operation, what, group))

        @contextmanager
        def waiting() -> Iterator[None]:
            with self._naming(what, group):
                yield
            if self.watch is not None and entry is not None:
                self.watch.waited_for(entry, StreamPlace())

        return Arrival(result, works, given, waiting, sent_bytes)

    def _broken_operation(self, what: str, group: Any, what_happened: str) -> str:
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != self.rank]
        return f"rank {self.rank}: {what} {what_happened}. {_what_to_look_at(others)}"


class Exchange:
    """A transfer under way. It holds the buffer being sent until the transfer, and those posted with it, are over."""

    def __init__(self, received: Tensor | None, works: list[Any], sent: Tensor, describe: Callable[[str], str] = str) -> None:
        self._result = sent if received is None else received
        self._works, self._sent, self._describe = works, [sent], describe

    @property
    def over(self) -> bool:
        """True once it was waited for, or if there is no transfer."""
        return not self._works

    def wait(self) -> Tensor:
        """What arrived, as often as asked; without a transfer, the tensor that was given.

        Raises:
            SparseRingError: it took longer than the group's time-out, or a peer is gone; names rank, layer, pass, hop and peers.
        """
        while self._works:
            try:
                self._works[-1].wait()
            except RuntimeError as error:
                raise SparseRingError(self._describe(f"did not get through ({error})")) from error
            self._works.pop()
        self._sent.clear()
        return self._result


class Arrival(Generic[T]):
    """An operation of a group under way. It holds what this rank gave until the operation is over.

    Attributes:
        sent_bytes: what leaves this rank for it; of a gathering or a sum as if parts of it went from neighbour to neighbour.
    """

    def __init__(
        self,
        result: T,
        works: list[Any],
        given: object,
        waiting: Callable[[], AbstractContextManager[None]],
        sent_bytes: int = 0,
    ) -> None:
        self._result, self._works, self._given, self._waiting = result, works, [given], waiting
        self.sent_bytes = sent_bytes

    def wait(self) -> T:
        """The result, as often as asked.

        Raises:
            SparseRingError: it took longer than the group's time-out, or a rank is gone; as often as asked, too.
        """
        if self._works:
            with self._waiting():
                while self._works:
                    self._works[-1].wait()
                    self._works.pop()
        self._given.clear()
        return self._result


def _host_numbers(values: list[float]) -> Tensor:
    """Float64, where the default process group reduces."""
    nccl = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    return torch.tensor(values, dtype=torch.float64, device=device)


def _at(place: Place | None, what: str) -> str:
    return what if place is None else f"{place}: {what}"


def _ranks(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


def _what_to_look_at(peers: list[int]) -> str:
    return (
        f"Look at the logs of {_ranks(peers)}: one of them may have died, stand still, or have called attention another number "
        "of times or in another order; if it is only slow, raise sparse_ring.timeout_s"
    )


def _own_group(groups: list[list[int]], rank: int, timeout: timedelta, *, urgent: bool = False) -> Any:
    """Create all groups of more than one rank, in the same order on every rank; the one that this rank is in.

    Args:
        urgent: its transfers hide behind work whose programs are many and short. On NCCL they run on a stream of high
            priority, so that the next multiprocessors that become free are theirs. Otherwise they would begin when every
            program launched before has begun: after the hop, not during it.
    """
    own = None
    for members in groups:
        options = _high_priority(timeout) if urgent and len(members) > 1 else None
        group = dist.new_group(members, timeout=timeout, pg_options=options) if len(members) > 1 else None
        own = group if rank in members else own
    return own


def _high_priority(timeout: timedelta) -> Any:
    """Options of a new group, new for each: torch writes the group's name into them. Builds without NCCL lack the class."""
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options
