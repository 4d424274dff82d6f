"""Attention kernels: one contract (``contract.py``), one module per backend."""

from __future__ import annotations

import warnings
from functools import cache

import torch

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.kernels.contract import ColumnKV, Kernel, Work
from ds_sparse_ring.kernels.torch_reference import TorchKernel

__all__ = ["BACKENDS", "GPU_BACKENDS", "ColumnKV", "Kernel", "Work", "get_kernel"]

BACKENDS = ("auto", "cuda", "triton", "cpu", "torch")
GPU_BACKENDS = ("cuda", "triton")
"""Names of the kernels for GPUs."""


def get_kernel(backend: str, *, spare_multiprocessors: int = 0) -> Kernel:
    """The kernel of a backend name.

    "auto": on a GPU CUDA C++ if it is a Hopper GPU and the op can be built, else Triton; on a CPU the C++ kernels if it can have
    them, else the reference.

    Args:
        spare_multiprocessors: see `CudaKernel`; other backends have no use for it.

    Raises:
        SparseRingError: an unknown backend, or one that cannot be had here.
    """
    if backend not in BACKENDS:
        raise SparseRingError(f"sparse_ring.backend: unknown backend {backend!r}; use one of {', '.join(BACKENDS)}")
    if backend == "auto":
        return _best_on_gpus(spare_multiprocessors) if _trains_on_gpus() else _best_on_cpus()
    if backend == "cuda":
        return _cuda_kernel(spare_multiprocessors)
    return {"triton": _triton_kernel, "cpu": _cpu_kernel, "torch": TorchKernel}[backend]()


def _best_on_gpus(spare_multiprocessors: int) -> Kernel:
    from ds_sparse_ring.op_builder import CUDAAttentionBuilder  # imports DeepSpeed

    if CUDAAttentionBuilder().is_available():
        try:
            return _cuda_kernel(spare_multiprocessors)
        except SparseRingError as error:
            _warn_once(f"{error}. Triton's kernels are used")
    return _triton_kernel()


def _best_on_cpus() -> Kernel:
    from ds_sparse_ring.op_builder import CPUAttentionBuilder

    return _cpu_kernel() if CPUAttentionBuilder().is_available() else TorchKernel()


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _trains_on_gpus() -> bool:
    """DeepSpeed's accelerator decides: DS_ACCELERATOR=cpu trains on the CPU of a machine with GPUs."""
    from deepspeed.accelerator import get_accelerator

    return torch.cuda.is_available() and str(get_accelerator().device_name()) == "cuda"


def _cuda_kernel(spare_multiprocessors: int) -> Kernel:
    from ds_sparse_ring.op_builder import CUDAAttentionBuilder

    builder = CUDAAttentionBuilder()
    if not builder.is_available():
        raise SparseRingError(
            f'sparse_ring.backend: "cuda" cannot be had here: {builder.error_log}; leave the key out for the fastest kernels here'
        )
    _triton_kernel()  # does what the CUDA kernels do not: refuses where Triton is missing
    from ds_sparse_ring.kernels.cuda_attention import CudaKernel

    try:
        return CudaKernel(spare_multiprocessors=spare_multiprocessors)
    except (RuntimeError, ImportError) as error:
        raise SparseRingError(
            f"sparse_ring.backend: the CUDA kernels could not be built: {f'{error} '.splitlines()[0][:300]}. "
            'Set "backend": "triton" to do without them'
        ) from error


def _triton_kernel() -> Kernel:
    try:
        from ds_sparse_ring.kernels.triton_attention import TritonKernel
    except ImportError as error:
        raise SparseRingError(
            f"sparse_ring.backend: the GPU kernels need Triton, which cannot be imported here ({error}): install a build of "
            'torch that comes with it, pip install triton, or set "backend": "torch" (right, but slow)'
        ) from error
    return TritonKernel()


def _cpu_kernel() -> Kernel:
    from ds_sparse_ring.kernels.cpu import CPUKernel

    try:
        return CPUKernel()
    except RuntimeError as error:
        raise SparseRingError(
            f'sparse_ring.backend: the CPU kernels could not be built: {error}. Set "backend": "torch" to do without them'
        ) from error
