"""The CUDA C++ attention kernels for Hopper GPUs."""

from __future__ import annotations

import torch
from deepspeed.ops.op_builder.builder import (
    TORCH_MAJOR,
    TORCH_MINOR,
    CUDAOpBuilder,
    MissingCUDAException,
    installed_cuda_version,
)

from ds_sparse_ring.op_builder.builder import CSRC, SparseRingOpBuilder

_CAPABILITY = (9, 0)
_OLDEST_NVCC = (12, 5)


class CUDAAttentionBuilder(SparseRingOpBuilder, CUDAOpBuilder):
    """Compiles for sm_90a alone: its instructions exist on no other architecture, older or newer, where Triton takes over.

    The kernels see no header of torch; ``bindings.cpp`` binds them.
    """

    NAME = "sparse_ring_cuda_attention"
    BUILD_VAR = "DS_BUILD_SPARSE_RING_CUDA_ATTENTION"
    SOURCES = ("cuda/bindings.cpp", *sorted(f"cuda/{path.name}" for path in (CSRC / "cuda").glob("*.cu")))
    HAS_STAND_IN = True

    def cxx_args(self) -> list[str]:
        """Options of the C++ compiler, for the binding."""
        return ["-O3", "-g0", "-std=c++20" if (TORCH_MAJOR, TORCH_MINOR) >= (2, 12) else "-std=c++17"]

    def nvcc_args(self) -> list[str]:
        """Options of nvcc; without NDEBUG its assembler may run matrix products one after the other."""
        return ["-O3", "-DNDEBUG", "-std=c++17", *self.compute_capability_args()]

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        """The one architecture; DeepSpeed's own list cannot name it. TORCH_CUDA_ARCH_LIST is for other ops."""
        return ["-gencode=arch=compute_90a,code=sm_90a"]

    def is_available(self) -> bool:
        """A prebuilt module is of no use on another GPU."""
        return self._judge(self._device_refusal(), verbose=False) and super().is_available()

    def is_buildable(self, verbose: bool = False) -> bool:
        """Whether the op can be compiled here, for a GPU that may be elsewhere; if not, ``error_log`` says why."""
        return self._judge(self._compiler_refusal(), verbose)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be compiled here and runs here; if not, ``error_log`` says why."""
        return self._judge(self._device_refusal() or self._compiler_refusal(), verbose)

    def _judge(self, refusal: str | None, verbose: bool) -> bool:
        self.error_log = refusal
        if refusal is not None and verbose:
            self.warning(refusal)
        return refusal is None

    @staticmethod
    def _device_refusal() -> str | None:
        if torch.version.cuda is None or not torch.cuda.is_available():
            return "the CUDA kernels need a Hopper GPU and a build of torch for CUDA"
        found = torch.cuda.get_device_capability()
        if found != _CAPABILITY:
            return (
                f"the CUDA kernels are for GPUs of compute capability 9.0 (Hopper), {torch.cuda.get_device_name()} has "
                f"{found[0]}.{found[1]}: use backend 'triton'"
            )
        return None

    @staticmethod
    def _compiler_refusal() -> str | None:
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA: install a build for CUDA"
        try:
            found = installed_cuda_version()
        except MissingCUDAException as error:
            toolkit = f"the CUDA toolkit {torch.version.cuda}"
            return f"no CUDA compiler ({error}): install {toolkit}, set CUDA_HOME, or use backend 'triton'"
        if found < _OLDEST_NVCC or found[0] != int(torch.version.cuda.split(".")[0]):
            return (
                f"nvcc {found[0]}.{found[1]} cannot compile the CUDA kernels for a torch of CUDA {torch.version.cuda}: install "
                f"the CUDA toolkit {torch.version.cuda} (12.5 or later), set CUDA_HOME to it, or use backend 'triton'"
            )
        return None
