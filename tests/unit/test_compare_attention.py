"""The comparison of attentions: facts stand where they are said to, runs resume, each is read under its own attention, too."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.train.compare_attention import (
    Setting,
    claimed,
    jobs,
    rate_of,
    run_all,
    training_row,
    variants,
)
from ds_sparse_ring.train.compare_data import Data
from ds_sparse_ring.train.compare_report import counted_lengths, load_runs, spread, write_report
from ds_sparse_ring.train.needles import FACTS_END, VALUE_DIGITS, FactForm, plant

FORM = FactForm((1, 2), (1, 3, 2), (4,), (5, 6), (7, 6), (8, 1), tuple(range(10, 20)), tuple(range(20, 60)))
TINY = Setting(
    tokens=512,
    yarn_from=128,
    segment_tokens=64,
    local_blocks=2,
    steps=4,
    lr=1e-2,
    train_facts=(5, 2),
    eval_facts=(3, 2),
    lengths=(256, 512),
    validation_rows=2,
    retrieval_rows=1,
    log_steps=2,
)


@pytest.fixture
def data() -> Data:
    random = np.random.default_rng(0)
    train, validation = (random.integers(60, 128, (rows, 512)).astype(np.uint16) for rows in (3, 2))
    return Data(train, validation, FORM, {"made": "up"})


@pytest.mark.parametrize("tokens,middle,tail", [(512, 6, 3), (2048, 30, 16)])
def test_each_question_has_one_fact_far_before_it(tokens: int, middle: int, tail: int) -> None:
    text = np.random.default_rng(1).integers(60, 128, tokens)
    row = plant(text, FORM, np.random.default_rng(2), middle=middle, tail=tail, middle_end=0.8)
    assert row.ids.shape == text.shape and row.answers.shape == (middle + tail, VALUE_DIGITS) and row.at_tail.sum() == tail
    keys = set()
    for fact, answers, at_tail in zip(row.facts, row.answers, row.at_tail, strict=True):
        key = row.ids[fact - 5 : fact - 2]  # word, joint, word
        assert (row.ids[answers[0] - 5 : answers[0] - 2] == key).all()
        assert row.ids[fact - 7 : fact - 5].tolist() == [1, 2] and row.ids[answers[0] - 8 : answers[0] - 5].tolist() == [1, 3, 2]
        assert (row.ids[answers] == row.ids[fact : fact + VALUE_DIGITS]).all() and set(row.ids[answers]) <= set(FORM.digits)
        assert fact < FACTS_END * tokens < answers[0]
        assert (
            answers[-1] < 0.8 * tokens if not at_tail else answers[0] >= tokens - max(0.03 * tokens, tail * FORM.question_tokens)
        )
        keys.add(tuple(key))
    assert len(keys) == middle + tail
    lines = (middle + tail) * (FORM.fact_tokens + FORM.question_tokens)
    assert (row.ids != text).sum() == lines  # no line over another: no number of a line is one of the text


def test_rows_are_the_same_for_all_runs_of_a_seed_and_come_again_with_other_facts(data: Data) -> None:
    first, again, other = (training_row(data, TINY, seed, 0).ids for seed in (0, 0, 1))
    assert (first == again).all() and (first != other).any()
    epochs = [{tuple(training_row(data, TINY, 0, 3 * epoch + step).ids) for step in range(3)} for epoch in range(2)]
    assert len(epochs[0] | epochs[1]) == 6


def test_short_rows_are_refused() -> None:
    with pytest.raises(SparseRingError, match="do not fit"):
        plant(np.zeros(256, np.int64), FORM, np.random.default_rng(0), middle=20, tail=1)


def test_data_comes_back_from_its_folder(data: Data, tmp_path: Path) -> None:
    data.save(tmp_path)
    read = Data.load(tmp_path)
    assert (read.train == data.train).all() and (read.validation == data.validation).all()
    assert read.form == FORM and read.about == data.about and read.train.dtype == np.uint16
    with pytest.raises(SparseRingError, match="--prepare"):
        Data.load(tmp_path / "none")


def test_budgets_are_a_tenth_of_the_triangle_at_full_length() -> None:
    lines = variants(Setting())
    window, moba = lines["window10"].config.selector, lines["moba10"].config.selector
    assert window.kind == "window" and window.window_blocks == 26
    assert moba.kind == "moba" and (moba.top_k, moba.block_tokens) == (4, 512)  # 10.6 %; 3 give 7.5 %
    assert lines["previous5"].config.local_blocks == 8 and lines["own5"].config.segment_tokens == 512


def test_other_seeds_come_behind_the_first_of_all_runs() -> None:
    assert jobs(["dense", "moba10", "own10"], [0, 1]) == [
        *(("dense", 0), ("moba10", 0), ("own10", 0)),
        *(("dense", 1), ("own10", 1), ("moba10", 1)),
    ]
    assert [round(rate_of(step, 20), 2) for step in (0, 1, 2, 19)] == [0.5, 1.0, 1.0, 0.15]


def test_a_run_that_another_process_has_is_left_to_it(tmp_path: Path) -> None:
    with claimed(tmp_path / "lock") as first, claimed(tmp_path / "lock") as second:
        assert first and not second
    with claimed(tmp_path / "lock") as third:
        assert third


def test_runs_are_written_skipped_and_reported(data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = LlamaConfig(vocab_size=128, num_hidden_layers=2, max_position_embeddings=128, rope_parameters=rope, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    data.save(tmp_path / "data")
    places = {"data": tmp_path / "data", "model": tmp_path / "model", "output": tmp_path / "out"}
    args = Namespace(**places, runs=["dense", "own10"], seeds=[0], seconds=None)
    assert run_all(args, TINY) == 0
    files = sorted((tmp_path / "out").glob("*.json"))
    assert [file.stem for file in files] == ["dense_s0", "own10_s0"]
    dense, own = (json.loads(file.read_text()) for file in files)
    assert dense["dense"] == dense["own"] and dense["train"]["density"] == 1.0
    assert 0 < own["train"]["density"] < 0.5 and own["own"]["density"] < 0.5 and own["dense"]["density"] == 1.0
    assert own["dense"]["loss"]["all"] != own["own"]["loss"]["all"]
    assert len(own["train"]["loss"]) == 4 and own["train"]["attention"][-1]["step"] == 3
    for result in (dense, own):
        assert result["train"]["answer_loss"][-1] < result["train"]["answer_loss"][0]  # ten digits, and no other word
        assert result["tokens"] == 2048 and set(result["own"]["retrieval"]) == {"256", "512"}
    capsys.readouterr()
    assert run_all(args, TINY) == 0 and not capsys.readouterr().out  # both are finished
    text = write_report(tmp_path / "out")
    assert "| dense | 1 | 1.000 |" in text and "segments of 64, one price, own probe" in text
    assert (tmp_path / "out/report.md").read_text() == text and (tmp_path / "out/curves.png").stat().st_size > 1000


def test_lengths_count_where_dense_attention_finds_facts(tmp_path: Path) -> None:
    found = {"100": {"middle": 0.9, "tail": 0.7}, "200": {"middle": 0.7, "tail": 0.8}}
    (tmp_path / "dense_s0.json").write_text(json.dumps({"run": "dense", "seed": 0, "setting": {}, "dense": {"retrieval": found}}))
    runs = load_runs(tmp_path)
    assert counted_lengths(runs, "middle") == ["100"] and counted_lengths(runs, "tail") == ["200"]
    assert spread([1.0, 2.0], 2) == "1.50 ± 0.50" and spread([1.0], 1) == "1.0"
    with pytest.raises(SparseRingError, match="no finished run"):
        load_runs(tmp_path / "none")
