"""Attention kernels: one contract (``contract.py``), one module per backend."""

from __future__ import annotations

import torch

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.kernels.contract import ColumnKV, Kernel, Work
from ds_sparse_ring.kernels.torch_reference import TorchKernel

__all__ = ["BACKENDS", "ColumnKV", "Kernel", "Work", "get_kernel"]

BACKENDS = ("auto", "triton", "cpu", "torch")


def get_kernel(backend: str) -> Kernel:
    """The kernel of a backend name. "auto": Triton on a GPU, the C++ kernels on a CPU that can have them, else the reference.

    Raises:
        SparseRingError: an unknown backend, or one that cannot be had here.
    """
    if backend == "torch":
        return TorchKernel()
    if backend not in BACKENDS:
        raise SparseRingError(f"sparse_ring.backend: unknown backend {backend!r}; use one of {', '.join(BACKENDS)}")
    if backend == "triton" or (backend == "auto" and _trains_on_gpus()):
        return _triton_kernel()
    from ds_sparse_ring.op_builder import CPUAttentionBuilder  # imports DeepSpeed

    builder = CPUAttentionBuilder()
    if backend == "auto" and not (builder.is_prebuilt() or builder.is_compatible()):
        return TorchKernel()
    from ds_sparse_ring.kernels.cpu import CPUKernel

    try:
        return CPUKernel()
    except RuntimeError as error:
        raise SparseRingError(
            f'sparse_ring.backend: the CPU kernels could not be built: {error}. Set "backend": "torch" to do without them'
        ) from error


def _trains_on_gpus() -> bool:
    """DeepSpeed's accelerator decides: DS_ACCELERATOR=cpu trains on the CPU of a machine with GPUs."""
    from deepspeed.accelerator import get_accelerator

    return torch.cuda.is_available() and str(get_accelerator().device_name()) == "cuda"


def _triton_kernel() -> Kernel:
    try:
        from ds_sparse_ring.kernels.triton_attention import TritonKernel
    except ImportError as error:
        raise SparseRingError(
            f"sparse_ring.backend: the GPU kernels need Triton, which cannot be imported here ({error}): install a build of "
            'torch that comes with it, pip install triton, or set "backend": "torch" (right, but slow)'
        ) from error
    return TritonKernel()
