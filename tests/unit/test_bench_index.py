"""The benchmark of selection runs anywhere, on planted and on recorded inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ds_sparse_ring.bench import index as bench
from ds_sparse_ring.errors import SparseRingError

TINY = ["--heads", "2", "--kv-heads", "1", "--head-size", "16", "--dtype", "float32", "--rounds", "1", "--device", "cpu"]


def _run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, [*TINY, *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_table_and_a_file_with_a_row_for_each_case(tmp_path: Path) -> None:
    out = tmp_path / "new" / "bench.json"
    table = _run("--tokens", "200", "--tokens", "0.5K", "--segment-tokens", "64", "--segment-tokens", "256",
                 "--segment-tokens", "0", "--attention-ms", "10", "--attention-ms", "20", "--output", str(out))  # fmt: skip
    rows = json.loads(out.read_text())["rows"]
    assert [(r["tokens"], r["segment_tokens"]) for r in rows] == [(200, 64), (200, None), (512, 64), (512, 256), (512, None)]
    assert all(0 < r["least_ms"] <= r["median_ms"] <= r["most_ms"] and r["diagonals_per_pattern"] >= 1 for r in rows)
    assert len([line for line in table.splitlines() if line.endswith("% |")]) == 5


def test_every_query_is_measured_with_its_own_segments_patterns_and_prices(tmp_path: Path) -> None:
    def rows(*arguments: str, segment: str = "64") -> dict[str, Any]:
        out = tmp_path / "bench.json"
        _run("--selector", "every_query", "--tokens", "0.5K", "--segment-tokens", segment, *arguments, "--output", str(out))
        return json.loads(out.read_text())

    shared, apart = rows(), rows("--heads-per-pattern", "1")
    assert (shared["heads_per_pattern"], apart["heads_per_pattern"]) == (None, 1)
    (dear, cheap), more = (rows("--price", price)["rows"][0] for price in ("0.3", "0.02")), rows(segment="256")["rows"][0]
    assert shared["rows"] and dear["columns_per_pattern"] < cheap["columns_per_pattern"] < more["columns_per_pattern"]
    assert apart["rows"][0]["columns_per_pattern"] < cheap["columns_per_pattern"], "one head wants less than two"
    assert cheap["diagonals_per_pattern"] < 2 and cheap["median_ms"] > 0
    _run("--selector", "every_query", "--tokens", "0.5K", "--output", str(tmp_path / "own.json"))
    assert [row["segment_tokens"] for row in json.loads((tmp_path / "own.json").read_text())["rows"]] == [256, 512]
    assert "is not one of" in " ".join(_run("--selector", "window", "--output", str(tmp_path / "no.json")).split())


def test_recorded_queries_and_keys_are_cut_to_length_and_checked(tmp_path: Path) -> None:
    recorded, out = tmp_path / "qk.pt", tmp_path / "bench.json"
    torch.save({"q": torch.randn(4, 256, 32), "k": torch.randn(2, 256, 32)}, recorded)
    _run("--tokens", "130", "--segment-tokens", "0", "--recorded", str(recorded), "--output", str(out))
    assert json.loads(out.read_text())["shape"] == {"heads": 4, "kv_heads": 2, "head_size": 32, "dtype": "float32"}
    with pytest.raises(SparseRingError, match="do not hold 512 tokens"):
        _run("--tokens", "512", "--recorded", str(recorded), "--output", str(out))


def test_attention_times_must_match_the_lengths(tmp_path: Path) -> None:
    assert "give one for each" in " ".join(_run("--tokens", "64", "--attention-ms", "1", "--attention-ms", "2").split())
