"""The builders: cache key, stale locks, refusals, registration. Building itself is tested by every kernel test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from typer.testing import CliRunner

from ds_sparse_ring.cli import app
from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import causal_cost, cost
from ds_sparse_ring.kernels import get_kernel
from ds_sparse_ring.op_builder import ALL_BUILDERS, CPUAttentionBuilder
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
