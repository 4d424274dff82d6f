"""The parts of the demo that need no training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.train.demo import Files, describe, follow, prepare, starting_hint

WRITER = """
import sys, time
with open(sys.argv[1], "w") as file:
    for part in ('{"step": 1}\\n{"st', 'ep": 2}\\n', '{"step": 3}\\n'):
        file.write(part)
        file.flush()
        time.sleep(0.7)
"""


def test_follow_yields_whole_lines_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    lines = list(follow(path, process))
    assert [line["step"] for line in lines if line is not None] == [1, 2, 3]
    assert None in lines  # it did not block


def test_prepared_configuration_is_valid_and_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    files = Files(tmp_path / "demo")
    prepare(files, steps=80)
    assert SparseRingConfig.from_deepspeed(files.deepspeed).dense_warmup_steps == 20
    assert sum(path.stat().st_size for path in files.text.iterdir()) > 3_000_000
    prepare(files, steps=40)  # an earlier demo is replaced
    assert SparseRingConfig.from_deepspeed(files.deepspeed).dense_warmup_steps == 10
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("kept")
    with pytest.raises(SystemExit, match="not empty"):
        prepare(Files(tmp_path / "mine"), steps=80)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "kept"


def test_interrupted_build_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert "compiles" in starting_hint()
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "lock").touch()
    assert "compiles" in starting_hint()  # somebody may be building right now
    os.utime(tmp_path / "op" / "lock", (0, 0))
    with pytest.raises(SystemExit, match="remove .*lock"):
        starting_hint()
    (tmp_path / "op" / "lock").unlink()
    (tmp_path / "op" / "deepspeed_shm_comm.so").touch()
    assert "Starting two processes" in starting_hint()


def test_lines_are_described_with_the_figures_they_have() -> None:
    line = {
        "step": 5,
        "loss": 7.0301,
        "tokens_per_s": 730.2,
        "density": 0.21,
        "recall": 0.8,
        "pair_imbalance": 1.02,
        "per_layer": [],
    }
    assert describe(line) == "step 5      loss 7.030     730 tokens/s  density 0.210  recall 0.800  pair imbalance 1.020"
    assert describe({"event": "evaluation", "step": 9, "loss": 5.5}) == "evaluation  loss 5.500"
    assert describe({"event": "saved", "path": "x"}) == "saved       x"
