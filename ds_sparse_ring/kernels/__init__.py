"""Attention kernels: one contract (``contract.py``), one module per backend."""

from __future__ import annotations

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.kernels.contract import ColumnKV, Kernel
from ds_sparse_ring.kernels.torch_reference import TorchKernel

__all__ = ["ColumnKV", "Kernel", "get_kernel"]


def get_kernel(backend: str) -> Kernel:
    """The kernel of a backend name; "auto" takes the best one that runs here.

    Raises:
        SparseRingError: an unknown backend.
    """
    if backend in ("auto", "torch"):
        return TorchKernel()
    raise SparseRingError(f"sparse_ring.backend: unknown backend {backend!r}; use 'auto' or 'torch'")
