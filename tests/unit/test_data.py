"""Text, tokenizer, packing and rows: nothing is lost, bounds are kept, everything is repeatable."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from typer.testing import CliRunner

from ds_sparse_ring.batch import shard_batch
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.train import data as data_module
from ds_sparse_ring.train.data import (
    IGNORED,
    load_documents,
    standard_library_documents,
    tokenize,
    tokenize_documents,
    train_tokenizer,
)
from ds_sparse_ring.train.packing import pack_documents, pack_lengths, pack_stream
from ds_sparse_ring.train.prepare_data import app
from ds_sparse_ring.train.rows import PackedCollator, RowStream, load_prepared, packed_dataset

TEXT = "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # three, or drei; ünïcödé and \U0001f600\n"


@pytest.fixture(scope="module")
def library() -> list[str]:
    return standard_library_documents()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([TEXT] * 4, folder, vocab_size=300)
    return AutoTokenizer.from_pretrained(folder)


def texts_of(*paths: Any) -> list[str]:
    return list(load_documents(paths)["text"])


def test_standard_library_joins_packages_and_leaves_tests_out(library: list[str]) -> None:
    assert len(library) > 100
    asyncio = [document for document in library if document.startswith("# asyncio/__init__.py")]
    assert len(asyncio) == 1 and "class BaseEventLoop" in asyncio[0] and "# asyncio/tasks.py" in asyncio[0]
    assert not any(document.startswith("# test/") or "\n# test/" in document for document in library)
    assert max(map(len, library)) > 200_000


def test_documents_are_read_one_per_file_in_order(tmp_path: Path) -> None:
    texts = {"b.txt": "second\n\nwith an empty line\n", "a.txt": "first\n", "c.md": "third"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "skipped.bin").write_text("not text")
    assert texts_of(tmp_path) == [texts["a.txt"], texts["b.txt"], texts["c.md"]]
    assert texts_of(tmp_path / "c.md", str(tmp_path / "*.txt")) == [
        texts["c.md"],
        texts["a.txt"],
        texts["b.txt"],
    ]


def test_records_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1}\n{"text": "two\\nlines", "id": 2}\n')
    (tmp_path / "b.txt").write_text("three")
    Dataset.from_dict({"text": ["four", "five"]}).to_parquet(tmp_path / "c.parquet")
    assert texts_of(tmp_path) == ["one", "two\nlines", "three", "four", "five"]
    (tmp_path / "d.jsonl").write_text('{"content": "six"}\n')
    with pytest.raises(SparseRingError, match="'text' is needed"):
        load_documents([tmp_path / "d.jsonl"])


def test_paths_without_text_are_refused(tmp_path: Path, tokenizer) -> None:
    with pytest.raises(SparseRingError, match="matches no file"):
        load_documents([tmp_path / "*.txt"])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(SparseRingError, match="are empty"):
        packed_dataset([tmp_path], tokenizer, sequence_tokens=64, evaluation_sequences=0, seed=0)


def test_tokenizer_round_trips_any_text_and_marks_document_ends(tokenizer) -> None:
    ids = tokenize_documents([TEXT, "", "\x00 raw"], tokenizer)
    assert [row[-1] for row in ids] == [tokenizer.eos_token_id] * 3
    assert [tokenizer.decode(row[:-1]) for row in ids] == [TEXT, "", "\x00 raw"]
    assert len(ids[0]) < len(TEXT.encode()) and len(tokenizer) <= 300
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_too_small_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SparseRingError, match="258"):
        train_tokenizer([TEXT], tmp_path, vocab_size=257)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=12), blocks=st.integers(1, 4))
def test_packing_loses_no_token_and_starts_pieces_on_blocks(lengths: list[int], blocks: int) -> None:
    if not any(lengths):
        return
    rows = pack_lengths(lengths, sequence_tokens=blocks * BLOCK)
    found = sorted((piece.document, token) for row in rows for piece in row for token in range(piece.begin, piece.end))
    assert found == [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    for row in rows:
        assert sum(-(-(piece.end - piece.begin) // BLOCK) for piece in row) <= blocks
    for document, length in enumerate(lengths):
        pieces = sum(piece.document == document for row in rows for piece in row)
        assert pieces == -(-length // (blocks * BLOCK)), "a document that fits into a row is whole"


def test_rows_restart_positions_at_each_document_and_fill_no_more_blocks_than_they_may() -> None:
    lengths = [500, 65, 1, 64, 130]
    tokens = Dataset.from_dict({"input_ids": [[1000 * n + i for i in range(n)] for n in lengths], "length": lengths})
    rows = pack_documents(tokens, sequence_tokens=256)
    assert sorted(token for row in rows["input_ids"] for token in row) == sorted(t for ids in tokens["input_ids"] for t in ids)
    for row in rows:
        ids, positions = np.array(row["input_ids"]), np.array(row["position_ids"])
        pieces = np.split(np.arange(len(ids)), (positions == 0).nonzero()[0][1:])
        for piece in pieces:
            assert len(set(ids[piece] // 1000)) == 1 and (np.diff(ids[piece]) == 1).all()
            assert (positions[piece] == np.arange(len(piece))).all()
        batch = PackedCollator(pad_token_id=0)([row])
        sequence = shard_batch(batch, kind="striped", ranks=1, rank=0, segment_tokens=128)["sparse_ring"]
        assert sequence.layout.blocks * BLOCK <= 256 and sequence.tokens == len(ids)
        assert [(d.begin, d.end) for d in sequence.documents] == [(piece[0], piece[-1] + 1) for piece in pieces]


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(SparseRingError, match="no token"):
        pack_lengths([0], sequence_tokens=64)
    with pytest.raises(SparseRingError, match="multiple of 64.*got 200, near it is 192"):
        pack_lengths([10], sequence_tokens=200)


def as_lists(rows: Any) -> list[dict[str, Any]]:
    """Rows of a dataset or stream, which gives arrays, in a form that can be compared."""
    return [{key: np.asarray(value).tolist() for key, value in row.items()} for row in rows]


def letters(folder: Path, count: int = 20, length: int = 40) -> list[Path]:
    """Text files of one letter each."""
    for number in range(count):
        (folder / f"{number:02}.txt").write_text(chr(ord("a") + number) * length)
    return [folder]


def test_train_and_evaluation_share_no_document(tmp_path: Path, tokenizer) -> None:
    options: dict[str, Any] = {"sequence_tokens": 64, "seed": 3}
    paths = letters(tmp_path)
    for streaming in (False, True):
        data = packed_dataset(paths, tokenizer, evaluation_sequences=2, streaming=streaming, **options)
        rows = [as_lists(part) for part in (data.train, data.evaluation)]
        found = [{tokenizer.decode([t]) for row in part for t in row["input_ids"]} - {tokenizer.eos_token} for part in rows]
        assert len(data.evaluation) == 2 and found[0] and not found[0] & found[1]
        again = packed_dataset(paths, tokenizer, evaluation_sequences=2, streaming=streaming, **options)
        assert as_lists(again.train) == rows[0]
        everything = packed_dataset(paths, tokenizer, evaluation_sequences=0, streaming=streaming, **options)
        tokens = sum(map(len, tokenize_documents(texts_of(tmp_path), tokenizer)))
        assert len(everything.evaluation) == 0 and sum(len(row["input_ids"]) for row in everything.train) == tokens
        with pytest.raises(SparseRingError, match="fewer evaluation sequences"):
            packed_dataset(paths, tokenizer, evaluation_sequences=100, streaming=streaming, **options)


def test_text_is_tokenized_once(tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(documents: list[str], tokenizer: Any) -> list[np.ndarray]:
        calls.append(len(documents))
        return tokenize_documents(documents, tokenizer)

    monkeypatch.setattr(data_module, "tokenize_documents", counted)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{tmp_path} {i}"}}\n' for i in range(70)))
    first = tokenize(load_documents([tmp_path]), tokenizer)
    assert sum(calls) == 70 and max(calls) < 70
    again = tokenize(load_documents([tmp_path]), tokenizer)
    assert sum(calls) == 70 and again["input_ids"][:] == first["input_ids"][:]
    other = train_tokenizer([TEXT] * 4, tmp_path / "other", vocab_size=290)
    tokenize(load_documents([tmp_path / "a.jsonl"]), other)
    assert sum(calls) == 140, "another tokenizer makes other tokens"


def test_several_processes_tokenize_and_write_rows_as_one_does(tmp_path: Path, tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{tmp_path}{"x" * i}"}}\n' for i in range(160)))
    options: dict[str, Any] = {"sequence_tokens": 192, "evaluation_sequences": 0, "seed": 0}
    many = list(packed_dataset([tmp_path], tokenizer, workers=2, **options).train)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    assert list(packed_dataset([tmp_path / "b"], tokenizer, workers=1, **options).train) == many


def test_a_stream_goes_on_where_it_was_on_any_number_of_data_ranks(tmp_path: Path, tokenizer) -> None:
    documents = load_documents(letters(tmp_path, 26, 100), streaming=True)

    def stream() -> RowStream:
        return RowStream(pack_stream(tokenize(documents, tokenizer), sequence_tokens=128, seed=5, window=8))

    whole = stream()
    rows = [as_lists(whole.take(1, rank=0, ranks=1))[0]["input_ids"] for _ in range(60)]
    assert sorted(rows[:26]) == sorted(rows[26:52]) and len({row[0] for row in rows[:26]}) == 26, "an epoch has each row once"
    assert rows[:26] != sorted(rows[:26])
    before = stream()
    ranks = [row["input_ids"] for row in as_lists(before.take(2, rank=1, ranks=4))]
    assert ranks == rows[2:4]
    before.take(3, rank=0, ranks=1)
    state = pickle.loads(pickle.dumps(before.state_dict()))
    resumed = stream()
    resumed.load_state_dict(state)
    assert [row["input_ids"] for row in as_lists(resumed.take(20, rank=0, ranks=2))] == rows[11:31]


def test_tokenized_records_and_saved_datasets_are_documents(tmp_path: Path, tokenizer) -> None:
    Dataset.from_dict({"input_ids": [[1, 2, 3], [4]], "domain": ["x", "y"]}).save_to_disk(tmp_path / "saved")
    Dataset.from_dict({"input_ids": [[], [5, 6]]}).to_parquet(tmp_path / "b.parquet")
    for streaming in (False, True):
        documents = load_documents([tmp_path / "saved", tmp_path / "b.parquet"], streaming=streaming)
        assert [row["input_ids"] for row in as_lists(tokenize(documents, tokenizer))] == [[1, 2, 3], [4], [5, 6]]
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(SparseRingError, match="mix text and tokens"):
        load_documents([tmp_path / "a.txt", tmp_path / "saved"])


def test_prepared_data_is_what_the_text_gives(tmp_path: Path, tokenizer) -> None:
    (tmp_path / "text").mkdir()
    letters(tmp_path / "text", 20, 90)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = "--sequence-tokens 128 --evaluation-sequences 2 --seed 3"
    command = f"{tmp_path / 'text'} --tokenizer {tmp_path / 'tokenizer'} --output {tmp_path / 'out'} {options}"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    tokens = sum(map(len, tokenize_documents(texts_of(tmp_path / "text"), tokenizer)))
    assert f"20 documents of {tokens} tokens: 17 rows" in result.output
    expected = packed_dataset([tmp_path / "text"], tokenizer, sequence_tokens=128, evaluation_sequences=2, seed=3)
    prepared = load_prepared(tmp_path / "out", AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer"))
    assert prepared.sequence_tokens == 128
    assert list(prepared.train) == list(expected.train) and list(prepared.evaluation) == list(expected.evaluation)
    assert CliRunner().invoke(app, command.split()).exit_code == 1, "what is there is not overwritten"
    all_of_it = command.replace(str(tmp_path / "out"), str(tmp_path / "all")).replace("--evaluation-sequences 2", "")
    assert CliRunner().invoke(app, all_of_it.split()).exit_code == 0
    assert len(load_prepared(tmp_path / "all", tokenizer).evaluation) == 0
    with pytest.raises(SparseRingError, match="vocabulary of"):
        load_prepared(tmp_path / "out", train_tokenizer([TEXT], tmp_path / "other", vocab_size=270))
    with pytest.raises(SparseRingError, match="prepare_data.py"):
        load_prepared(tmp_path / "text", tokenizer)


def test_collator_pads_on_the_right_without_a_false_document_start() -> None:
    collator = pickle.loads(pickle.dumps(PackedCollator(pad_token_id=9)))
    rows = [
        {"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1]},
        {"input_ids": [5, 6], "position_ids": [0, 1]},
    ]
    batch = collator(rows)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[1, 2, 3, 4], [5, 6, 9, 9]],
        "position_ids": [[0, 1, 0, 1], [0, 1, 2, 3]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
        "labels": [[1, 2, 3, 4], [5, 6, IGNORED, IGNORED]],
    }
    assert all(value.dtype == torch.int64 for value in batch.values())
