"""A small training run whose saved tensors go through a store, as layer inputs do, and units of its sizes."""

from __future__ import annotations

import gc
import itertools

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ds_sparse_ring.copies import Tier
from ds_sparse_ring.disk import UNIT_BYTES, DiskFile
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.store import Store
from ds_sparse_ring.units import GIB, MIB

GIB_OF_A_MIB = MIB / GIB
"""Budgets are in GiB; those of tests are small."""


class MemoryFile(DiskFile):
    """A file in memory, for machines without libaio; may be told to fail."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.failing = nbytes, ""
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8)

    def read(self, buffer: Tensor, offset: int) -> None:
        assert offset % UNIT_BYTES == 0 and len(buffer) % UNIT_BYTES == 0
        if self.failing == "read":
            raise SparseRingError("the disk is gone")
        buffer.copy_(self._bytes[offset : offset + len(buffer)])

    def write(self, buffer: Tensor, offset: int) -> None:
        assert offset % UNIT_BYTES == 0 and len(buffer) % UNIT_BYTES == 0
        if self.failing == "write":
            raise SparseRingError("the disk is gone")
        self._bytes[offset : offset + len(buffer)].copy_(buffer)

    def close(self) -> None:
        pass


class Packed:
    """What the hooks leave in the graph for a tensor in the store."""

    def __init__(self, key: int) -> None:
        self.key = key


def offloaded(store: Store, tier: Tier) -> saved_tensors_hooks:
    """Within it every tensor that autograd saves goes through the store."""
    keys = itertools.count()

    def pack(x: Tensor) -> Packed:
        packed = Packed(next(keys))
        store.put((id(packed), packed.key), x, tier, owner=packed)
        return packed

    return saved_tensors_hooks(pack, lambda packed: store.get((id(packed), packed.key)))


def train(store: Store | None, tier: Tier, device: torch.device, width: int = 16, rows: int = 32) -> list[Tensor]:
    """Losses and gradients of five steps; after each, nothing is left in the store."""
    generator = torch.Generator(device).manual_seed(0)
    weights = [torch.randn(width, width, generator=generator, device=device, requires_grad=True) for _ in range(3)]
    room = store.room("host") if store is not None else 0
    seen = []
    for _ in range(5):
        x = torch.randn(rows, width, generator=generator, device=device)
        with offloaded(store, tier) if store is not None else torch.enable_grad():
            for w in weights:
                x = torch.tanh(x @ w)
            loss = x.square().mean()
        grads = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for w, g in zip(weights, grads, strict=True):
                w -= 0.1 * g
        seen += [loss.detach(), *grads]
        del loss, x
        if store is not None:
            gc.collect()
            assert store.room("host") == room, "the graph took what it kept along"
    return seen
