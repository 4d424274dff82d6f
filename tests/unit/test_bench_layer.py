"""The benchmark of chunked layers runs anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from ds_sparse_ring.bench import layer as bench

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def test_a_row_for_whole_layers_and_for_each_chunk_and_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"vocab_size": 8}))
    app, out = typer.Typer(), tmp_path / "new" / "bench.json"
    app.command()(bench.main)
    arguments = ["--model", str(tmp_path), "--tokens", "0.5K", "--columns", "8", "--slashes", "2", "--segment-tokens", "128"]
    arguments += ["--host-gib", "0.01", "--rounds", "1", "--device", "cpu", "--output", str(out)]
    for chunk in (0, 100):
        arguments += ["--chunk-tokens", str(chunk)]
    for page in (0, 128):
        arguments += ["--page-tokens", str(page)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    rows, tokens = (json.loads(out.read_text())[name] for name in ("rows", "tokens"))
    assert [(row["chunk_tokens"], row["page_tokens"]) for row in rows] == [(0, 0), (100, 0), (100, 128)] and tokens == 512
    assert all(0 < row["fastest_s"] <= row["median_s"] <= row["slowest_s"] for row in rows)
    assert len([line for line in result.output.splitlines() if line.endswith("| - |")]) == 3
