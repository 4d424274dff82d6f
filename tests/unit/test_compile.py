"""GPU kernels compile for Hopper and fit it; no GPU is needed for that: Triton's, and those in CUDA C++ where there is nvcc."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from ds_sparse_ring.op_builder import CUDAAttentionBuilder
from ds_sparse_ring.op_builder.builder import CSRC


@pytest.mark.parametrize("kernels", ["attention", "selection"])
def test_kernels_compile_for_hopper_and_fit_its_shared_memory(kernels: str) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_kernels.py"
    done = subprocess.run([sys.executable, str(script), kernels], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: the CUDA kernels are not compiled here")
def test_cuda_kernels_compile_for_hopper_without_spills_or_matrix_products_that_wait_for_each_other(tmp_path: Path) -> None:
    options = [*CUDAAttentionBuilder().nvcc_args(), "-Werror=all-warnings", "-Xptxas=-v"]
    sources = sorted((CSRC / "cuda").glob("*.cu"))

    def compiled(source: Path) -> str:
        command = ["nvcc", *options, "-c", str(source), "-o", str(tmp_path / f"{source.stem}.o")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(compiled, sources))
    kernels = 0
    for source, report in zip(sources, reports, strict=True):
        assert "C75" not in report, report  # ptxas: products are serialised, or register budgets are ignored
        used = [int(x) for x in re.findall(r"Used (\d+) registers", report)]
        spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
        assert len(spills) == len(used), report
        assert all(x == ("0", "0", "0") for x in spills), f"{source.name}: local memory\n{report}"
        # three or four warpgroups to a multiprocessor, five, or two blocks of nine warps: with more registers they do not fit
        most = 96 if source.stem.startswith("wanted") or source.stem in ("forward_bf16_64", "forward_fp16_64") else 168
        assert all(x <= most for x in used), f"{source.name}: registers {used}"
        kernels += len(used)
    assert kernels


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: CUDA's headers are missing")
def test_the_binding_of_the_cuda_kernels_is_good_cpp(tmp_path: Path) -> None:
    generated = tmp_path / "c10/cuda/impl/cuda_cmake_macros.h"  # which a build of torch without CUDA lacks
    generated.parent.mkdir(parents=True)
    generated.touch()
    folders = [tmp_path, sysconfig.get_path("include"), *include_paths()]
    options = [*CUDAAttentionBuilder().cxx_args(), "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    options += [f"-isystem{folder}" for folder in folders]
    command = ["nvcc", "-c", str(CSRC / "cuda/bindings.cpp"), "-o", str(tmp_path / "bindings.o"), "-DTORCH_EXTENSION_NAME=op"]
    command += ["-Xcompiler", ",".join(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
