"""Keys and values of a layer, page by page: cut from the shard, or kept in host memory between the forward and backward pass.

While the forward pass runs, keys and values are on the device as a whole: the selection needs all keys, and whoever calls
attention holds both. So its pages are cut from there. For the backward pass, which has the most to hold, they are put into the
store, each as it is taken for its own hops, and come back one page ahead. A replay that does not attend puts them all; the first
pass of a checkpointed layer puts none.

Shapes: K key/value heads, n local tokens, m tokens of a page, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.plan import Page
from ds_sparse_ring.spill import Spill


class KV(Protocol):
    """A rank's keys and values of one layer.

    Attributes:
        heads: K.
    """

    heads: int

    def load(self, page: Page) -> Tensor:
        """``[2, K, m, D]`` on the device, a new tensor; pages are asked for in order."""

    def whole(self) -> Tensor | tuple[Tensor, Tensor]:
        """Keys and values ``[K, n, D]`` on the device, for who cannot take pages."""


class DeviceKV:
    """Keys and values that are on the device.

    Args:
        k, v: ``[K, n, D]``. keep: where the pages are put on their way.
    """

    def __init__(self, k: Tensor, v: Tensor, keep: HostKV | None = None) -> None:
        self.heads = k.shape[0]
        self._k, self._v, self._keep = k, v, keep

    def load(self, page: Page) -> Tensor:
        """See `KV.load`."""
        kv = torch.stack([self._k[:, page.tokens], self._v[:, page.tokens]])
        if self._keep is not None:
            self._keep.put(page, kv)
        return kv

    def whole(self) -> tuple[Tensor, Tensor]:
        """See `KV.whole`."""
        if self._keep is not None:
            self._keep.put_all(self)
        return self._k, self._v


class HostKV:
    """Keys and values in host memory, once: what was loaded is there no longer. All of it goes with this object, too."""

    def __init__(self, spill: Spill, pages: Sequence[Page], heads: int) -> None:
        self.heads = heads
        self._spill, self._pages = spill, pages
        self._keys: dict[int, int] = {}

    def put(self, page: Page, kv: Tensor) -> None:
        """Keep a page, ``[2, K, m, D]``, which is not written to afterwards.

        Raises:
            SparseRingError: no room, naming what would help.
        """
        self._keys[page.number] = key = next(self._spill.numbers)
        self._spill.put(key, kv, owner=self)

    def put_all(self, kv: DeviceKV) -> None:
        """Keep all pages without attending to them."""
        for page in self._pages:
            kv.load(page)

    def prefetch(self, number: int = 0) -> None:
        """Start to copy a page to the device, if there is one of that number."""
        if number in self._keys:
            self._spill.opened.prefetch(self._keys[number])

    def load(self, page: Page) -> Tensor:
        """See `KV.load`; the next page begins to come."""
        key = self._keys.pop(page.number)
        kv = self._spill.opened.get(key)
        self._spill.opened.drop(key)
        self.prefetch(page.number + 1)
        return kv

    def whole(self) -> Tensor:
        """See `KV.whole`."""
        return torch.cat([self.load(page) for page in self._pages], 2)


def kept_pages(found: list[HostKV]) -> HostKV:
    """What the forward pass, or its replay, has put; each backward pass takes it.

    Raises:
        SparseRingError: it was taken already.
    """
    if not found:
        raise SparseRingError(
            "attention: keys and values in host memory serve one backward pass, and this is the second one of the same forward "
            "pass: use gradient checkpointing, which makes them again, or leave sparse_ring.offload.kv_page_tokens out"
        )
    return found.pop()
