"""Text to packed sequences: documents, a tokenizer, and rows of a fixed length that keep document bounds.

The default text is the Python standard library of the running interpreter: it is on every machine, needs no download
and, joined per package, gives documents as long as source repositories do. Any other text comes in as files, one
document each.

A row says where documents start by ``position_ids`` that restart at 0: the one signal for document bounds that
DeepSpeed, Transformers and this package agree on.
"""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ds_sparse_ring.errors import SparseRingError

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
IGNORED = -100
"""Label of tokens without a target, as in Transformers."""

_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
_RECORDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def standard_library_documents() -> list[str]:
    """Sources of the running Python's standard library without its tests: one document per package or top-level module.

    About 12 MB of text; sorted by name, so that every rank and every run on one machine sees the same documents.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    packages: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not _NOT_LIBRARY.intersection(parts) and not parts[-1].startswith("test_"):
            packages.setdefault(parts[0], []).append(path)
    return [_joined(files, root) for _, files in sorted(packages.items())]


def _joined(files: Sequence[Path], root: Path) -> str:
    pieces = (f"# {file.relative_to(root)}\n{file.read_text(encoding='utf-8', errors='replace')}" for file in files)
    return "\n".join(pieces)


def load_text_documents(paths: Sequence[str | Path]) -> list[str]:
    """Read documents: a text file is one, a record of a JSON-lines, JSON or Parquet file with a column ``text`` is one.

    Args:
        paths: files, folders (their files with a known suffix, at any depth) or glob patterns, read in this order (files
            of a folder or pattern sorted by name); none at all stands for :func:`standard_library_documents`.

    Raises:
        SparseRingError: a path that matches no file, records without ``text``, or nothing but empty documents.
    """
    if not paths:
        return standard_library_documents()
    files = [file for path in paths for file in _matching_files(str(path))]
    documents: list[str] = []
    for builder, group in groupby(files, key=lambda file: _RECORDS.get(Path(file).suffix, "text")):
        options = {"sample_by": "document"} if builder == "text" else {}
        rows = load_dataset(builder, data_files=list(group), split="train", **options)
        if "text" not in rows.column_names:
            raise SparseRingError(f"text: records have the columns {rows.column_names}; one called 'text' is needed")
        documents += [text for text in rows["text"] if text]
    if not documents:
        raise SparseRingError(f"text: all {len(files)} files of {list(map(str, paths))} are empty")
    return documents


def _matching_files(pattern: str) -> list[str]:
    known = (*_TEXT_SUFFIXES, *_RECORDS)
    if Path(pattern).is_dir():
        found = [str(file) for file in sorted(Path(pattern).rglob("*")) if file.suffix in known]
    else:
        found = sorted(file for file in glob.glob(pattern, recursive=True) if Path(file).is_file())
    if not found:
        raise SparseRingError(f"text: {pattern!r} matches no file; give a file, a pattern or a folder of {', '.join(known)}")
    return found


def train_tokenizer(documents: Iterable[str], folder: str | Path, *, vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer and save it, so that ``AutoTokenizer.from_pretrained(folder)`` loads it.

    Byte level: any text round-trips and there is no unknown token.

    Args:
        folder: created if missing.
        vocab_size: upper bound on entries, the 256 bytes and two special tokens included; at least 258.
    """
    if vocab_size < 258:
        raise SparseRingError(f"tokenizer: vocab_size {vocab_size} is too small; 256 bytes and 2 special tokens take 258")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PAD)
    wrapped.save_pretrained(folder)
    return wrapped


def tokenize_documents(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Token ids of each document, int32, with the end-of-text token behind it."""
    if tokenizer.eos_token_id is None:
        raise SparseRingError("tokenizer: it has no eos_token, which ends each document; set tokenizer.eos_token")
    batch = list(documents)
    # verbose=False: documents longer than the tokenizer's model_max_length are meant to be cut into rows later
    rows = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [np.array([*row, tokenizer.eos_token_id], dtype=np.int32) for row in rows]


def pack_documents(documents: Sequence[np.ndarray], *, sequence_tokens: int) -> Dataset:
    """Cut the stream of documents into rows of ``sequence_tokens`` tokens; the last may be shorter, no token is lost.

    Returns:
        A dataset with ``input_ids`` and ``position_ids``. Positions restart at 0 at each document and at each row, as a
        document's tokens attend only to those of it that lie in the same row.
    """
    if sequence_tokens < 1:
        raise SparseRingError(f"packing: sequence_tokens must be positive, got {sequence_tokens}")
    documents = [document for document in documents if len(document)]
    if not documents:
        raise SparseRingError("packing: there is no token to pack")
    lengths = np.array([len(document) for document in documents])
    ids = np.concatenate(documents).astype(np.int32)
    token = np.arange(ids.size)
    document_start = np.repeat(lengths.cumsum() - lengths, lengths)
    row_start = token - token % sequence_tokens
    positions = (token - np.maximum(document_start, row_start)).astype(np.int32)
    cuts = range(sequence_tokens, ids.size, sequence_tokens)
    return Dataset.from_dict({"input_ids": np.split(ids, cuts), "position_ids": np.split(positions, cuts)})


def packed_dataset(
    paths: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_tokens: int,
    evaluation_sequences: int,
    seed: int,
) -> tuple[Dataset, Dataset]:
    """``(train, evaluation)`` rows of the text at ``paths``; deterministic, so each rank may build them by itself.

    Args:
        evaluation_sequences: rows to evaluate on; their documents are not trained on. Zero gives an empty dataset.
    """
    documents = load_text_documents(paths)
    order = np.random.default_rng(seed).permutation(len(documents))
    tokens = tokenize_documents((documents[i] for i in order), tokenizer)
    wanted = evaluation_sequences * sequence_tokens
    held_out = 0
    while wanted > 0 and held_out < len(tokens):
        wanted -= len(tokens[held_out])
        held_out += 1
    if held_out == len(tokens):
        raise SparseRingError(
            f"text: {evaluation_sequences} evaluation sequences of {sequence_tokens} tokens take all {len(tokens)} "
            "documents; give more text or ask for fewer evaluation sequences"
        )
    train = pack_documents(tokens[held_out:], sequence_tokens=sequence_tokens)
    if not held_out:
        return train, train.select(range(0))
    evaluation = pack_documents(tokens[:held_out], sequence_tokens=sequence_tokens)
    return train, evaluation.select(range(min(evaluation_sequences, len(evaluation))))


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
