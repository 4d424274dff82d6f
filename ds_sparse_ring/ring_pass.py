"""One pass around the ring: what the loops of `attention` do beside their arithmetic, told to the meter on its way.

Keys and values travel here, gradients in the loop of the backward pass.

While the meter is active every hop has two times, both of the device: its kernels, and what the compute stream stands still for
until a transfer has arrived. Beside them the host's time for a turn of the loop, and the bytes that are sent.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from ds_sparse_ring.comm import TAG_KV, TAG_KV_AHEAD, Exchange, Place
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.meter import HopPart
from ds_sparse_ring.pages import KV
from ds_sparse_ring.plan import Hop, RingPlan, Transfer


class RingPass:
    """The forward or backward pass of one layer; its methods are called hop by hop.

    Attributes:
        kv: keys and values at hand in this hop, ``[2, K, m, D]``. Only read here: a second name would keep them in memory while
            room is made for those that arrive.
    """

    kv: Tensor

    def __init__(self, context: SequenceContext, layer: int, *, backward: bool) -> None:
        self._axes, self._meter = context.axes, context.meter
        self._layer, self._backward, self._hop = layer, backward, 0

    def hops(self, plan: RingPlan, keys: KV) -> Iterator[Hop]:
        """The plan's hops, one turn of the loop each: what it passes on of `kv` is under way meanwhile."""
        arriving, ahead = deque[Exchange](), deque[Exchange]()
        for self._hop, hop in enumerate(plan.hops):
            begin_s = time.perf_counter() - self._meter.own_s  # what measuring takes is not the loop's
            if hop.load is not None:
                self.kv = keys.load(hop.load)
            if hop.kv_ahead is not None:
                ahead.append(self.exchange(self.kv, hop.kv_ahead, TAG_KV_AHEAD))
            arriving.extend(self.exchange_all(self.kv, hop.kv, TAG_KV))
            yield hop
            if not hop.ends_page:
                self.kv = self.wait((arriving or ahead).popleft())
            self._meter.count("host_s", time.perf_counter() - self._meter.own_s - begin_s)
            self._meter.count("hops", 1)

    @property
    def _place(self) -> Place:
        return Place(self._layer, self._backward, self._hop)

    def _count(self, x: Tensor, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self._meter.count(f"sent_{transfer.level}_bytes", x.numel() * x.element_size())

    def computing(self) -> AbstractContextManager[None]:
        """Around the kernels of a hop."""
        return self._meter.timed(HopPart(self._backward, self._layer, self._hop, "compute"))

    def exchange(self, x: Tensor, transfer: Transfer | None, tag: int) -> Exchange:
        """`Axes.exchange`."""
        self._count(x, () if transfer is None else (transfer,))
        return self._axes.exchange(x, transfer, tag, self._place)

    def exchange_all(self, x: Tensor, transfers: Sequence[Transfer], tag: int) -> list[Exchange]:
        """`Axes.exchange_all`."""
        self._count(x, transfers)
        return self._axes.exchange_all(x, transfers, tag, self._place)

    def wait(self, exchange: Exchange) -> Tensor:
        """`Exchange.wait`."""
        if exchange.over:
            return exchange.wait()
        with self._meter.timed(HopPart(self._backward, self._layer, self._hop, "wait")):
            return exchange.wait()
