"""What a run trains and evaluates on: packed rows from text, from a prepared folder or from a stream, and their batches."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset, DatasetDict, load_from_disk
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.train.data import IGNORED, load_documents, tokenize
from ds_sparse_ring.train.packing import ROW_FEATURES, pack_documents, pack_stream

_SUMMARY = "packing.json"
_TOKENIZING = timedelta(hours=12)


@dataclass(frozen=True)
class PackedData:
    """Rows to train and to evaluate on. ``train`` is an ``IterableDataset`` if it is streamed."""

    train: Any
    evaluation: Dataset
    sequence_tokens: int


@dataclass(frozen=True)
class Summary:
    """What stands in a prepared folder beside the rows.

    Attributes:
        documents, tokens, longest, median: of all documents, held-out ones included. cut: documents longer than a row.
        padding: share of the documents' blocks that is no token. filled: share of the training rows that is tokens.
        vocabulary: size of the tokenizer's.
    """

    sequence_tokens: int
    documents: int
    tokens: int
    longest: int
    median: float
    cut: int
    rows: int
    evaluation_rows: int
    padding: float
    filled: float
    vocabulary: int


def open_rows(
    data: str | None,
    text: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_tokens: int,
    evaluation_sequences: int,
    seed: int,
    streaming: bool,
) -> PackedData:
    """What the options of a training script ask for: rows prepared in a folder, or text packed now.

    Raises:
        SparseRingError: options that contradict each other.
    """
    if data is None:
        options: dict[str, Any] = {"sequence_tokens": sequence_tokens, "evaluation_sequences": evaluation_sequences, "seed": seed}
        return packed_dataset(text, tokenizer, streaming=streaming, **options)
    if text or streaming:
        raise SparseRingError("--data has its rows already: leave out --text and --streaming")
    return load_prepared(data, tokenizer)


def packed_dataset(
    paths: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_tokens: int,
    evaluation_sequences: int,
    seed: int,
    streaming: bool = False,
    workers: int | None = None,
) -> PackedData:
    """Rows of the documents at ``paths``; deterministic, so that each rank may build them by itself.

    With several ranks the first one of each host works, the others read its cache.

    Args:
        paths: as :func:`ds_sparse_ring.train.data.load_documents`. evaluation_sequences: rows to evaluate on; their documents
            are not trained on. Zero gives an empty dataset. seed: of the order of documents (of a stream: of its rows).
        streaming: read the training documents while training goes on. workers: processes; default: this host's cores.
    """
    workers = workers or available_cores()
    with first_of_host():
        tokens = tokenize(load_documents(paths, streaming=streaming), tokenizer, workers=workers)
        if streaming:
            return _streamed(tokens, sequence_tokens, evaluation_sequences, seed)
        if not len(tokens):
            raise SparseRingError(f"text: all documents of {list(map(str, paths))} are empty: give files with text")
        order = np.random.default_rng(seed).permutation(len(tokens))
        lengths = np.asarray(tokens.with_format("numpy")["length"])[order]
        held_out = _held_out(lengths, evaluation_sequences, sequence_tokens)
        options: dict[str, Any] = {"sequence_tokens": sequence_tokens, "workers": workers}
        train = pack_documents(tokens.select(order[held_out:]), **options)
        if not held_out:
            return PackedData(train, train.select(range(0)), sequence_tokens)
        evaluation = pack_documents(tokens.select(order[:held_out]), **options)
        evaluation = evaluation.select(range(min(evaluation_sequences, len(evaluation))))
        return PackedData(train, evaluation, sequence_tokens)


def _held_out(lengths: Iterable[int], evaluation_sequences: int, sequence_tokens: int) -> int:
    """How many of the first documents make up the rows to evaluate on."""
    wanted, count = evaluation_sequences * sequence_tokens, 0
    for length in lengths:
        if wanted <= 0:
            return count
        wanted, count = wanted - int(length), count + 1
    raise SparseRingError(
        f"text: {evaluation_sequences} evaluation sequences of {sequence_tokens} tokens take all {count} "
        "documents; give more text or ask for fewer evaluation sequences"
    )


def _streamed(tokens: Any, sequence_tokens: int, evaluation_sequences: int, seed: int) -> PackedData:
    rows = pack_stream(tokens, sequence_tokens=sequence_tokens, seed=seed)
    if not evaluation_sequences:
        return PackedData(rows, Dataset.from_dict({key: [] for key in ROW_FEATURES}, features=ROW_FEATURES), sequence_tokens)
    held_out = _held_out((row["length"] for row in tokens), evaluation_sequences, sequence_tokens)
    first = Dataset.from_list(list(tokens.take(held_out)))
    evaluation = pack_documents(first, sequence_tokens=sequence_tokens)
    rest = pack_stream(tokens.skip(held_out), sequence_tokens=sequence_tokens, seed=seed)
    return PackedData(rest, evaluation.select(range(min(evaluation_sequences, len(evaluation)))), sequence_tokens)


def summarize(lengths: np.ndarray, data: PackedData, tokenizer: PreTrainedTokenizerBase) -> Summary:
    """Lengths of documents, and how full rows are.

    Args:
        lengths: tokens of each document.
    """
    blocks = int((-(-lengths // BLOCK)).sum())
    in_rows = sum(len(row["input_ids"]) for row in data.train.with_format("numpy"))
    return Summary(
        sequence_tokens=data.sequence_tokens,
        documents=len(lengths),
        tokens=int(lengths.sum()),
        longest=int(lengths.max()),
        median=float(np.median(lengths)),
        cut=int((lengths > data.sequence_tokens).sum()),
        rows=len(data.train),
        evaluation_rows=len(data.evaluation),
        padding=1 - float(lengths.sum()) / (BLOCK * blocks),
        filled=in_rows / (len(data.train) * data.sequence_tokens),
        vocabulary=len(tokenizer),
    )


def save_prepared(folder: str | Path, data: PackedData, summary: Summary, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write rows, tokenizer and summary, for `load_prepared` and for ``datasets.load_from_disk``."""
    shards = {"train": None, "evaluation": None if len(data.evaluation) else 1}  # without a file it could not be loaded
    DatasetDict({"train": data.train, "evaluation": data.evaluation}).save_to_disk(folder, num_shards=shards)
    tokenizer.save_pretrained(Path(folder) / "tokenizer")
    (Path(folder) / _SUMMARY).write_text(json.dumps(asdict(summary), indent=1) + "\n", encoding="utf-8")


def load_prepared(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> PackedData:
    """What `save_prepared` has written.

    Raises:
        SparseRingError: another folder, or rows that were made with another tokenizer.
    """
    file = Path(folder) / _SUMMARY
    if not file.is_file():
        raise SparseRingError(f"data: {folder} has no {_SUMMARY}: give a folder that train/prepare_data.py has written")
    try:
        summary = Summary(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise SparseRingError(f"data: {file} is not what this version writes ({error}): prepare the text again") from None
    if summary.vocabulary != len(tokenizer):
        raise SparseRingError(
            f"data: {folder} was made with a vocabulary of {summary.vocabulary}, the tokenizer has {len(tokenizer)}: use the one "
            f"in {Path(folder) / 'tokenizer'}, or prepare the text again"
        )
    splits = load_from_disk(folder)
    return PackedData(splits["train"], splits["evaluation"], summary.sequence_tokens)


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def first_of_host() -> Iterator[None]:
    """The first rank of each host runs the body before the others of the host do. Collective over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    # a group of its own: tokenizing takes longer than operations may, and NCCL would need a device that is not chosen yet
    group = dist.new_group(backend="gloo", timeout=_TOKENIZING)
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, os.uname().nodename, group=group)
    first = hosts.index(os.uname().nodename) == dist.get_rank()
    if not first:
        dist.barrier(group)
    try:
        yield
    finally:  # also after an error, which the others then meet by themselves
        if first:
            dist.barrier(group)


class RowStream:
    """Rows of an ``IterableDataset`` without an end, dealt to data ranks; it can be put back where it was.

    Every data rank reads the whole stream and keeps its part, so that the place is the same one everywhere and a run can be
    resumed on another number of ranks.
    """

    def __init__(self, rows: Any) -> None:
        self._rows, self._epoch = rows, 0
        self._iterator = iter(rows)

    def take(self, count: int, *, rank: int, ranks: int) -> list[dict[str, Any]]:
        """The next ``count`` rows of this data rank; those of all ``ranks`` are taken from the stream.

        Raises:
            SparseRingError: the stream has no row at all.
        """
        rows = [self._next() for _ in range(count * ranks)]
        return rows[rank * count : (rank + 1) * count]

    def _next(self) -> dict[str, Any]:
        row = next(self._iterator, None)
        if row is None:
            self._start(self._epoch + 1)
            row = next(self._iterator, None)
        if row is None:
            raise SparseRingError("text: the stream has no document: give files with text")
        return row

    def _start(self, epoch: int) -> None:
        self._epoch = epoch
        self._rows.set_epoch(epoch)  # without it, an epoch after a resumed one would start where that one did
        self._iterator = iter(self._rows)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return {"epoch": self._epoch, "rows": self._rows.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there."""
        self._rows.load_state_dict(state["rows"])
        self._start(state["epoch"])


@dataclass(frozen=True)
class PackedCollator:
    """Rows of a packed dataset to a batch of int64 ``[B, S]`` tensors, shorter rows padded on the right.

    Gives input_ids, position_ids, attention_mask (0 on padding) and labels (the input itself, ``-100`` on padding; what
    shards the batch shifts them). Positions count on through padding, so that it never looks like a new document.
    """

    pad_token_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        batch: dict[str, list[Tensor]] = {"input_ids": [], "position_ids": [], "attention_mask": [], "labels": []}
        for row in rows:
            ids = torch.as_tensor(row["input_ids"], dtype=torch.int64)
            positions = torch.as_tensor(row["position_ids"], dtype=torch.int64)
            padding = longest - ids.numel()
            further = positions[-1] + 1 + torch.arange(padding)
            batch["input_ids"].append(pad(ids, (0, padding), value=self.pad_token_id))
            batch["position_ids"].append(torch.cat([positions, further]))
            batch["attention_mask"].append(pad(torch.ones_like(ids), (0, padding)))
            batch["labels"].append(pad(ids, (0, padding), value=IGNORED))
        return {name: torch.stack(tensors) for name, tensors in batch.items()}
