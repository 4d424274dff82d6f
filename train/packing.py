"""Documents to training rows of a fixed length, block by block, without losing a token.

A document starts on a block boundary of the ring's layout (`ds_sparse_ring.layout.BLOCK` tokens), so rows are packed in whole
blocks: by ``trl.pack_dataset``, best fit decreasing ("Fewer Truncations Improve Language Modeling", 2404.10830). A document
stays whole if it fits into a row; a longer one is cut at row lengths. The blocks of a row, and with them a step's memory, are
thus bounded by ``sequence_tokens``, however many short documents are in it.

A row says where its documents start by ``position_ids`` that restart at 0: the one signal for document bounds that DeepSpeed,
Transformers and this package agree on. They are made here, for whole rows, before anything is cut over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets.fingerprint import Hasher
from trl import pack_dataset

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import BLOCK

WINDOW_DOCUMENTS = 1024
"""Documents of a stream that are packed together."""

ROW_FEATURES = Features({"input_ids": List(Value("int32")), "position_ids": List(Value("int32"))})
"""Columns of packed rows."""


class Piece(NamedTuple):
    """Tokens ``[begin, end)`` of a document; ``begin`` is a multiple of BLOCK."""

    document: int
    begin: int
    end: int


def pack_lengths(lengths: Sequence[int] | np.ndarray, *, sequence_tokens: int) -> list[list[Piece]]:
    """Which pieces of documents stand in which row; each token in exactly one.

    Args:
        lengths: tokens of each document. sequence_tokens: a multiple of BLOCK; a row's pieces take no more in whole blocks.

    Raises:
        SparseRingError: another length of rows, or no token at all.
    """
    if sequence_tokens < BLOCK or sequence_tokens % BLOCK:
        raise SparseRingError(
            f"packing: sequence_tokens must be a positive multiple of {BLOCK}, as documents start on blocks of so many tokens; "
            f"got {sequence_tokens}, near it is {max(1, round(sequence_tokens / BLOCK)) * BLOCK}"
        )
    lengths = np.asarray(lengths, dtype=np.int64)
    begins = np.concatenate([[0], np.cumsum(-(-lengths // BLOCK))])  # of documents, in blocks
    if begins[-1] == 0:
        raise SparseRingError("packing: there is no token to pack")
    blocks = pa.LargeListArray.from_arrays(pa.array(begins), pa.array(np.arange(begins[-1])))
    packed = pack_dataset(
        Dataset(pa.table({"block": blocks})),
        seq_length=sequence_tokens // BLOCK,
        strategy="bfd_split",
        map_kwargs={"batch_size": len(lengths), "desc": "packing"},
    ).with_format("numpy")
    rows = []
    for row in packed:
        firsts = row["block"][np.concatenate([[0], np.cumsum(row["seq_lengths"])[:-1]])]
        documents = np.searchsorted(begins, firsts, side="right") - 1
        starts = (firsts - begins[documents]) * BLOCK
        ends = np.minimum(starts + row["seq_lengths"] * BLOCK, lengths[documents])
        rows.append([Piece(*piece) for piece in np.stack([documents, starts, ends], axis=1).tolist()])
    return rows


def make_row(pieces: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """``input_ids`` and ``position_ids`` (restarting at 0 with each piece) of a row, int32."""
    pieces = list(pieces)
    return {
        "input_ids": np.concatenate(pieces).astype(np.int32),
        "position_ids": np.concatenate([np.arange(len(piece), dtype=np.int32) for piece in pieces]),
    }


def pack_documents(tokens: Dataset, *, sequence_tokens: int, workers: int = 1) -> Dataset:
    """Rows of tokenized documents (:func:`ds_sparse_ring.train.data.tokenize`), written once and then read from the cache.

    Raises:
        SparseRingError: as `pack_lengths`.
    """
    tokens = tokens.with_format("numpy")
    rows = pack_lengths(np.asarray(tokens["length"]), sequence_tokens=sequence_tokens)
    plan = Dataset.from_dict({"pieces": [[tuple(piece) for piece in row] for row in rows]})
    fingerprint = Hasher.hash([tokens._fingerprint, sequence_tokens, "rows"])
    files = tokens.cache_files
    folder = Path(files[0]["filename"]).parent if files else None
    workers = max(1, min(workers, len(rows) // 16))
    return plan.map(
        _Rows(tokens),
        remove_columns=plan.column_names,
        features=ROW_FEATURES,
        new_fingerprint=fingerprint,
        cache_file_name=str(folder / f"rows-{fingerprint}.arrow") if folder else None,
        num_proc=workers if workers > 1 else None,
        writer_batch_size=16,
        desc="writing rows",
    )


class _Rows:
    """A row from the plan of its pieces."""

    def __init__(self, tokens: Dataset) -> None:
        self.tokens = tokens

    def __call__(self, row: dict[str, Any]) -> dict[str, np.ndarray]:
        pieces = [Piece(*piece) for piece in row["pieces"]]
        return make_row(self.tokens[p.document]["input_ids"][p.begin : p.end] for p in pieces)


class _Window:
    """A window of a stream's documents to rows, in an order that follows from the seed and the window's place."""

    def __init__(self, sequence_tokens: int, seed: int) -> None:
        self.sequence_tokens, self.seed = sequence_tokens, seed

    def __call__(self, batch: dict[str, list[Any]], places: list[int]) -> dict[str, list[np.ndarray]]:
        documents = [np.asarray(ids) for ids in batch["input_ids"]]
        plan = pack_lengths([len(document) for document in documents], sequence_tokens=self.sequence_tokens)
        order = np.random.default_rng((self.seed, places[0])).permutation(len(plan))
        rows = [make_row(documents[p.document][p.begin : p.end] for p in plan[i]) for i in order]
        return {key: [row[key] for row in rows] for key in ROW_FEATURES}


def pack_stream(tokens: Any, *, sequence_tokens: int, seed: int, window: int = WINDOW_DOCUMENTS) -> Any:
    """`pack_documents` for an ``IterableDataset``: windows of documents are packed for themselves, their rows shuffled."""
    return tokens.map(
        _Window(sequence_tokens, seed),
        with_indices=True,
        batched=True,
        batch_size=window,
        remove_columns=list(tokens.column_names or ("input_ids", "length")),
        features=ROW_FEATURES,
    )
