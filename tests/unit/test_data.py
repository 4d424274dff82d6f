"""Text, tokenizer and packing: nothing is lost, bounds are kept, everything is repeatable."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.train.data import (
    IGNORED,
    PackedCollator,
    load_text_documents,
    pack_documents,
    packed_dataset,
    standard_library_documents,
    tokenize_documents,
    train_tokenizer,
)

TEXT = "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # three, or drei; ünïcödé and \U0001f600\n"


@pytest.fixture(scope="module")
def library() -> list[str]:
    return standard_library_documents()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([TEXT] * 4, folder, vocab_size=300)
    return AutoTokenizer.from_pretrained(folder)


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
    assert load_text_documents([tmp_path]) == [texts["a.txt"], texts["b.txt"], texts["c.md"]]
    assert load_text_documents([tmp_path / "c.md", str(tmp_path / "*.txt")]) == [
        texts["c.md"],
        texts["a.txt"],
        texts["b.txt"],
    ]


def test_records_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1}\n{"text": "two\\nlines", "id": 2}\n')
    (tmp_path / "b.txt").write_text("three")
    Dataset.from_dict({"text": ["four", "five"]}).to_parquet(tmp_path / "c.parquet")
    assert load_text_documents([tmp_path]) == ["one", "two\nlines", "three", "four", "five"]
    (tmp_path / "d.jsonl").write_text('{"content": "six"}\n')
    with pytest.raises(SparseRingError, match="'text' is needed"):
        load_text_documents([tmp_path / "d.jsonl"])


def test_paths_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SparseRingError, match="matches no file"):
        load_text_documents([tmp_path / "*.txt"])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(SparseRingError, match="are empty"):
        load_text_documents([tmp_path])


def test_tokenizer_round_trips_any_text_and_marks_document_ends(tokenizer) -> None:
    ids = tokenize_documents([TEXT, "", "\x00 raw"], tokenizer)
    assert [row[-1] for row in ids] == [tokenizer.eos_token_id] * 3
    assert [tokenizer.decode(row[:-1]) for row in ids] == [TEXT, "", "\x00 raw"]
    assert len(ids[0]) < len(TEXT.encode()) and len(tokenizer) <= 300
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_too_small_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SparseRingError, match="258"):
        train_tokenizer([TEXT], tmp_path, vocab_size=257)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12), sequence_tokens=st.integers(1, 50))
def test_packing_loses_no_token_and_restarts_positions(lengths: list[int], sequence_tokens: int) -> None:
    if not any(lengths):
        return
    documents = [1000 * number + np.arange(length) for number, length in enumerate(lengths)]
    rows = pack_documents(documents, sequence_tokens=sequence_tokens)
    assert [token for row in rows["input_ids"] for token in row] == np.concatenate(documents).tolist()
    assert all(len(row) == sequence_tokens for row in rows["input_ids"][:-1])
    for ids, positions in zip(rows["input_ids"], rows["position_ids"], strict=True):
        assert positions[0] == 0
        for left in range(len(ids) - 1):
            same_document = ids[left] // 1000 == ids[left + 1] // 1000
            assert positions[left + 1] == (positions[left] + 1 if same_document else 0)


def test_packing_nothing_is_refused() -> None:
    with pytest.raises(SparseRingError, match="no token"):
        pack_documents([np.array([], dtype=np.int32)], sequence_tokens=4)


def test_train_and_evaluation_share_no_document(tmp_path: Path, tokenizer) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(chr(ord("a") + number) * 40)
    train, evaluation = packed_dataset([tmp_path], tokenizer, sequence_tokens=64, evaluation_sequences=2, seed=3)
    letters = [
        {tokenizer.decode([token]) for row in part["input_ids"] for token in row} - {tokenizer.eos_token}
        for part in (train, evaluation)
    ]
    assert len(evaluation) == 2 and not letters[0] & letters[1]
    again, _ = packed_dataset([tmp_path], tokenizer, sequence_tokens=64, evaluation_sequences=2, seed=3)
    assert again["input_ids"][:] == train["input_ids"][:]
    everything, nothing = packed_dataset([tmp_path], tokenizer, sequence_tokens=64, evaluation_sequences=0, seed=3)
    assert len(nothing) == 0 and sum(map(len, everything["input_ids"])) == len(
        np.concatenate(tokenize_documents(load_text_documents([tmp_path]), tokenizer))
    )
    with pytest.raises(SparseRingError, match="fewer evaluation sequences"):
        packed_dataset([tmp_path], tokenizer, sequence_tokens=64, evaluation_sequences=100, seed=3)


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
