"""The builders: cache key, stale locks, refusals, registration. Building itself is tested by every kernel test."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder.builder import MissingCUDAException, OpBuilder
from typer.testing import CliRunner

from ds_sparse_ring.cli import app
from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import causal_cost, cost
from ds_sparse_ring.kernels import get_kernel
from ds_sparse_ring.op_builder import ALL_BUILDERS, CPUAttentionBuilder, CUDAAttentionBuilder
from ds_sparse_ring.op_builder.builder import environment_key


def test_the_cache_key_names_python_torch_and_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    key = environment_key()
    assert key.isidentifier() and key in CPUAttentionBuilder().name
    monkeypatch.setattr(torch, "__version__", "9.9.9+cu999")
    assert environment_key() != key and "9_9_9_cu999" in environment_key()
    monkeypatch.setattr("ds_sparse_ring.op_builder.builder._processor_flags", lambda: "another processor")
    assert environment_key().rpartition("_")[2] != key.rpartition("_")[2]


def test_a_lock_left_by_a_killed_build_is_named_and_does_not_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builder = CPUAttentionBuilder()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    stale = tmp_path / builder.name / "lock"
    stale.parent.mkdir()
    stale.touch()
    warnings: list[str] = []
    monkeypatch.setattr("ds_sparse_ring.op_builder.builder.logger.warning", warnings.append)
    monkeypatch.setattr(builder, "jit_load", lambda verbose: "built")
    assert builder.load() == "built"
    assert not stale.exists()
    assert str(stale) in warnings[0]


def test_a_processor_or_machine_without_a_compiler_falls_back_to_the_reference_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CPUAttentionBuilder, "command_exists", lambda self, command: False)
    builder = CPUAttentionBuilder()
    assert not builder.is_compatible() and "apt-get install g++" in str(builder.error_log)
    assert get_kernel("auto").name == "torch"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not builder.is_compatible() and "aarch64" in str(builder.error_log)


def test_a_named_backend_that_cannot_be_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: CPUAttentionBuilder, verbose: bool = False) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(CPUAttentionBuilder, "load", fail)
    with pytest.raises(SparseRingError, match='no compiler.*"backend": "torch"'):
        get_kernel("cpu")


CUDA_TORCH = {"torch.version.cuda": "13.0", "torch.cuda.is_available": lambda: True, "torch.cuda.get_device_name": lambda: "card"}


@pytest.mark.parametrize(
    ("capability", "nvcc", "says"),
    [
        ((8, 0), (13, 0), "compute capability 9.0 .Hopper., card has 8.0: use backend 'triton'"),
        ((10, 0), (13, 0), "card has 10.0"),
        ((9, 0), None, "no CUDA compiler .*: install the CUDA toolkit 13.0, set CUDA_HOME, or use backend 'triton'"),
        ((9, 0), (12, 4), "nvcc 12.4 cannot compile"),
        ((9, 0), (12, 8), "nvcc 12.8 cannot compile the CUDA kernels for a torch of CUDA 13.0"),
        ((9, 0), (13, 1), None),
    ],
)
def test_where_the_cuda_kernels_cannot_be_had_triton_takes_over_and_the_name_is_refused_with_the_reason(
    capability: tuple[int, int], nvcc: tuple[int, int] | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> tuple[int, int]:
        if nvcc is None:
            raise MissingCUDAException("there is none")
        return nvcc

    for name, value in {**CUDA_TORCH, "torch.cuda.get_device_capability": lambda: capability}.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setattr("ds_sparse_ring.op_builder.cuda_attention.installed_cuda_version", found)
    builder = CUDAAttentionBuilder()
    assert builder.is_compatible() == builder.is_available() == (says is None)
    if says is None:
        return
    assert re.search(says, str(builder.error_log))
    monkeypatch.setattr("ds_sparse_ring.kernels._trains_on_gpus", lambda: True)
    assert get_kernel("auto").name == "triton"
    with pytest.raises(SparseRingError, match=f'"cuda" cannot be had here: .*{says}.*leave the key out'):
        get_kernel("cuda")


def test_cuda_kernels_that_cannot_be_built_are_refused_by_name_and_replaced_with_a_warning_where_left_to_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: CUDAAttentionBuilder, verbose: bool = False) -> None:
        raise RuntimeError("Error building extension\nlines of a compiler")

    monkeypatch.setattr(CUDAAttentionBuilder, "load", fail)
    monkeypatch.setattr(CUDAAttentionBuilder, "is_available", lambda self: True)
    monkeypatch.setattr("ds_sparse_ring.kernels._trains_on_gpus", lambda: True)
    with pytest.raises(SparseRingError, match='could not be built: Error building extension. Set "backend": "triton"'):
        get_kernel("cuda")
    with pytest.warns(UserWarning, match="Error building extension.*Triton's kernels are used"):
        assert get_kernel("auto").name == "triton"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_kernel("auto").name == "triton", "warns once"


def test_the_cuda_kernels_are_compiled_for_hopper_alone_whatever_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a")
    arguments = CUDAAttentionBuilder().nvcc_args()
    assert [x for x in arguments if "arch" in x] == ["-gencode=arch=compute_90a,code=sm_90a"] and "-DNDEBUG" in arguments


def test_sources_are_absolute_for_the_jit_and_relative_for_setuptools() -> None:
    builder = CPUAttentionBuilder()
    assert not any(Path(source).is_absolute() for source in builder.sources())
    builder.jit_mode = True
    assert all(Path(source).is_absolute() and Path(source).is_file() for source in builder.sources())
    assert "-march=native" not in builder.cxx_args()


def test_the_report_lists_our_ops_and_those_of_deepspeed() -> None:
    result = CliRunner().invoke(app, ["report"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for builder in ALL_BUILDERS:
        assert builder.NAME in result.output
    assert "cpu_adam" in result.output, "DeepSpeed's own table"


@pytest.mark.parametrize(("density", "by_columns"), [(0.1, 0.03), (0.1, None), (0.3, 0.0)])
def test_benchmark_patterns_have_the_density_that_was_asked_for(density: float, by_columns: float | None) -> None:
    from ds_sparse_ring.bench.patterns import vertical_slash_pattern

    segments = make_segments([64 * 64], 64, 1024)
    index = vertical_slash_pattern(segments, 2, density=density, column_density=by_columns)
    blocks = torch.arange(64)
    for segment in segments[1:]:  # the first is too short for its share
        rows = blocks[segment.begin : segment.end]
        got = cost(index, rows).sum(1) / causal_cost(segments, rows).sum()
        assert got.tolist() == pytest.approx([density, density], rel=0.15)
    assert index.equal(vertical_slash_pattern(segments, 2, density=density, column_density=by_columns))
