"""The C++ attention kernels for CPUs."""

from __future__ import annotations

import platform

from deepspeed.ops.op_builder.builder import TORCH_MAJOR, TORCH_MINOR
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from ds_sparse_ring.op_builder.builder import SparseRingOpBuilder


class CPUAttentionBuilder(SparseRingOpBuilder, CPUOpBuilder):
    """Compiles for AVX-512, AVX2 and the x86-64 baseline at once; the processor is asked at run time.

    So there is no ``-march=native``: a wheel built on one machine runs, and runs fast, on another.
    """

    NAME = "sparse_ring_cpu_attention"
    BUILD_VAR = "DS_BUILD_SPARSE_RING_CPU_ATTENTION"
    SOURCES = (
        "cpu/bindings.cpp",
        "cpu/kernel_avx512.cpp",
        "cpu/kernel_avx2.cpp",
        "cpu/kernel_baseline.cpp",
    )

    def __init__(self, *, sanitize: bool = False) -> None:
        """
        Args:
            sanitize: compile with the address and undefined-behaviour sanitizers, into a cache folder of its own.
        """
        super().__init__()
        self.sanitize = sanitize
        if sanitize:
            self.name += "_sanitize"

    def cxx_args(self) -> list[str]:
        """Compiler options; the same for the JIT and ahead of time."""
        standard = "-std=c++20" if (TORCH_MAJOR, TORCH_MINOR) >= (2, 12) else "-std=c++17"
        if self.sanitize:
            return ["-O1", "-g", standard, "-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
        return ["-O3", "-g0", standard, "-fopenmp"]

    def extra_ldflags(self) -> list[str]:
        """Linker options of the JIT."""
        return ["-fopenmp", *(["-fsanitize=address,undefined"] if self.sanitize else [])]

    def libraries_args(self) -> list[str]:
        """Libraries to link ahead of time."""
        return ["gomp"]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be compiled here; if not, ``error_log`` says why."""
        if platform.machine() not in ("x86_64", "AMD64"):
            self.error_log = f"the CPU kernels are written for x86-64, this is {platform.machine()}: use backend 'torch'"
        elif not self.command_exists("c++"):
            self.error_log = "no C++ compiler (c++) found: install one (apt-get install g++), or use backend 'torch'"
        else:
            return True
        if verbose:
            self.warning(self.error_log)
        return False
