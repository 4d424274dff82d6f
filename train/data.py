"""Text and tokens: documents from files of many kinds, and a tokenizer.

The default text is the Python standard library of the running interpreter: it is on every machine, needs no download
and, joined per package, gives documents as long as source repositories do. Any other text comes in as files.
"""

from __future__ import annotations

import glob
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    LargeList,
    Value,
    concatenate_datasets,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.train.mds import open_shards, read_index

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
IGNORED = -100
"""Label of tokens without a target, as in Transformers."""

_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
_RECORDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_KNOWN = (*_TEXT_SUFFIXES, *_RECORDS)
_LEAVES = {
    "text": {"string", "large_string", "string_view", "null"},
    "input_ids": {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"null"},
}
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_TOKENS = Features({"input_ids": LargeList(Value("int32")), "length": Value("int64")})
_BATCH_DOCUMENTS = 64
"""Documents that are tokenized, written and packed at a time: long ones must not pile up in memory."""


def standard_library_documents() -> list[str]:
    """Sources of the running Python's standard library without its tests: one document per package or top-level module.

    About 12 MB of text; sorted by name, so that every rank and every run on one machine sees the same documents.
    """
    return source_documents(Path(sysconfig.get_paths()["stdlib"]))


def source_documents(root: Path) -> list[str]:
    """Python sources below ``root`` without tests, sorted: one document per folder or module that lies directly in it."""
    packages: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not _NOT_LIBRARY.intersection(parts) and not parts[-1].startswith("test_"):
            packages.setdefault(parts[0], []).append(path)
    return [_joined(files, root) for _, files in sorted(packages.items())]


def _joined(files: Sequence[Path], root: Path) -> str:
    pieces = (f"# {file.relative_to(root)}\n{file.read_text(encoding='utf-8', errors='replace')}" for file in files)
    return "\n".join(pieces)


def load_documents(paths: Sequence[str | Path], *, streaming: bool = False) -> Any:
    """Documents as a dataset of ``datasets``, with a column ``text`` or, tokenized already, ``input_ids``.

    A text file is one document. A record of JSON lines, JSON or Parquet is one, as is a row of a folder that
    ``Dataset.save_to_disk`` has written. A folder of MDS shards (ProLong's data) holds text, or tokens with ``indices`` where
    documents begin and end.

    Args:
        paths: files, folders (in them files with a known suffix and folders of these kinds, at any depth) or glob patterns, read
            in this order (those of a folder or pattern sorted by name); none stands for :func:`standard_library_documents`.
        streaming: give an ``IterableDataset``, which reads files while they are used.

    Raises:
        SparseRingError: a path that matches no file, records without these columns, sources that do not go together,
            MDS shards that are not whole, a file that cannot be read (of a stream: when its turn comes).
    """
    if not paths:
        return _generated(_library_rows, {"python": sys.version}, streaming)
    parts: list[Any] = []
    files = [found for path in paths for found in _sources(str(path))]
    for kind, group in groupby(files, key=_kind):
        if kind == "mds":
            parts += [part for folder in group for part in _mds(folder, streaming)]
        elif kind == "disk":
            parts += [_saved(folder, streaming) for folder in group]
        else:
            options = {"sample_by": "document"} if kind == "text" else {}
            parts.append(_read_files(kind, list(group), streaming, options))
    if not parts:
        raise SparseRingError(f"text: {list(map(str, paths))} hold MDS shards without a sample: give others")
    columns = [_used_column(part) for part in parts]
    if len(set(columns)) > 1:
        raise SparseRingError(f"text: {list(map(str, paths))} mix text and tokens; give them in runs of their own")
    return concatenate_datasets([part.select_columns([columns[0]]) for part in parts])


def _read_files(kind: str, files: list[str], streaming: bool, options: dict[str, Any]) -> Any:
    try:
        builder: Any = load_dataset_builder(kind, data_files=files, **options)
        builder._generate_tables = partial(_whole_tables, builder, files)
        if streaming:
            return builder.as_streaming_dataset(split="train")
        builder.download_and_prepare()
        return builder.as_dataset(split="train")
    except (DatasetGenerationError, ValueError, OSError) as error:
        for known in (error, error.__cause__):
            if isinstance(known, SparseRingError):
                raise known from None
        raise _unreadable(kind, files, error.__cause__ or error) from error


def _whole_tables(builder: Any, files: list[str], /, **parts: Any) -> Iterator[Any]:
    """What a builder of ``datasets`` reads, with the file named that is not text: a stream meets it long after it began."""
    try:
        for key, table in type(builder)._generate_tables(builder, **parts):
            table.validate(full=True)  # JSON and Parquet are read without a look at their text
            yield key, table
    except (ValueError, OSError) as error:
        raise _unreadable(builder.dataset_name, parts.get("base_files", files), error) from error


def _unreadable(kind: str, files: Sequence[str], error: BaseException) -> SparseRingError:
    reason = " ".join(str(error).split())[:200]
    if (broken := _not_utf8(files)) is not None:
        return SparseRingError(f"text: {broken} is no text in UTF-8 ({reason}): convert it, as iconv does, or leave it out")
    of = files[0] if len(files) == 1 else f"of {list(files[:3])}{' and others' if files[3:] else ''} one"
    return SparseRingError(
        f"text: {of} cannot be read as {kind} ({reason}): text must be UTF-8, JSON lines one object a line with the same keys"
    )


def _not_utf8(files: Sequence[str]) -> str | None:
    """The first file that is no UTF-8: ``datasets`` does not say which of thousands it was reading."""
    for name in files:
        if Path(name).suffix not in (*_TEXT_SUFFIXES, ".jsonl", ".json"):
            continue  # Parquet, or what a pattern matches besides: packed text, for one
        with open(name, encoding="utf-8") as text:
            try:
                while text.read(1 << 20):
                    pass
            except UnicodeDecodeError:
                return name
    return None


def _used_column(part: Any) -> str:
    names = _column_names(part)
    column = next((name for name in ("input_ids", "text") if name in names), None)
    if column is None:
        raise SparseRingError(f"text: records have the columns {names}; one called 'text' is needed, or tokens as 'input_ids'")
    kind = (part.features or {}).get(column)  # a stream may not know it yet
    if kind is not None and _leaf(kind) not in _LEAVES[column]:
        wanted = "text" if column == "text" else "a list of whole numbers"
        raise SparseRingError(f"text: the column '{column}' holds {_leaf(kind)}: convert it, it must be {wanted}")
    return column


def _leaf(kind: Any) -> str:
    """The type in a column, or in the lists of a column of tokens."""
    return str(getattr(getattr(kind, "feature", kind), "dtype", kind))


def _column_names(part: Any) -> list[str]:
    """Of a stream, those of its first row, as long as it does not know them."""
    return part.column_names or list(next(iter(part), {}))


def _generated(generator: Any, arguments: dict[str, Any], streaming: bool) -> Any:
    if streaming:
        return IterableDataset.from_generator(generator, gen_kwargs=arguments)
    try:
        return Dataset.from_generator(generator, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, SparseRingError):
            raise error.__cause__ from None
        raise


def _saved(folder: str, streaming: bool) -> Any:
    try:
        dataset = load_from_disk(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SparseRingError(
            f"text: {folder} is not whole ({error}): save it again by Dataset.save_to_disk, or give its files by a pattern"
        ) from None
    if not isinstance(dataset, Dataset):
        raise SparseRingError(f"text: {folder} holds several splits, {sorted(dataset)}: give the folder of one of them")
    return dataset.to_iterable_dataset() if streaming else dataset


def _library_rows(python: str) -> Iterator[dict[str, str]]:
    for text in standard_library_documents():
        yield {"text": text}


def _mds(folder: str, streaming: bool) -> list[Any]:
    """One dataset, or none if there is no sample."""
    index = read_index(folder)
    assert index is not None, "its kind says so"
    shards = open_shards(folder, index)
    for shard in shards:
        if not {"input_ids", "text"} & set(shard.names):
            raise SparseRingError(f"text: {shard.path} has the columns {shard.names}; 'text' or 'input_ids' is needed")
    return (
        [_generated(_mds_rows, {"folder": folder, "index": index}, streaming)] if any(shard.samples for shard in shards) else []
    )


def _mds_rows(folder: str, index: str) -> Iterator[dict[str, Any]]:
    # the index is an argument so that other shards in the same folder are not taken from a cache
    for shard in open_shards(folder, index):
        wanted = ("input_ids", "indices") if "input_ids" in shard.names else ("text",)
        for row in shard.rows(wanted):
            yield from _documents_of(shard.path, row) if "input_ids" in row else [row]


def _documents_of(path: Path, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The documents of a sample of tokens, which ``indices`` has begin and end of."""
    tokens = np.ravel(row["input_ids"])
    bounds = np.asarray(row.get("indices", [(0, len(tokens))]))
    if tokens.dtype.kind not in "iu" or (tokens.size and (tokens.min() < 0 or int(tokens.max()) > np.iinfo(np.int32).max)):
        raise SparseRingError(
            f"text: 'input_ids' in {path} are no tokens but {tokens.dtype}: whole numbers below 2**31 are needed"
        )
    if bounds.size and (bounds.ndim != 2 or bounds.shape[1] != 2 or bounds.min() < 0 or bounds.max() > len(tokens)):
        raise SparseRingError(f"text: 'indices' in {path} are no begins and ends within {len(tokens)} tokens: write them anew")
    for begin, end in bounds.tolist():
        yield {"input_ids": tokens[begin:end].astype(np.int32)}


def _kind(path: str) -> str:
    if os.path.isdir(path):
        return "mds" if read_index(path) is not None else "disk"
    return _RECORDS.get(Path(path).suffix, "text")


def _is_one(folder: Path) -> bool:
    """Whether a folder is read as a whole."""
    return read_index(folder) is not None or any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _below(folder: Path) -> Iterator[str]:
    """What is read of a folder, sorted: files with a known suffix, and folders that are read as a whole, at any depth."""
    if _is_one(folder):
        yield str(folder)
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (not path.is_symlink() or _is_one(path)):  # other links may lead in circles
            yield from _below(path)
        elif path.suffix in _KNOWN:
            yield str(path)


def _sources(pattern: str) -> list[str]:
    """The files, or the folders that are read as a whole, that a path stands for."""
    if Path(pattern).is_dir():
        found = list(_below(Path(pattern)))
    else:
        found = sorted(file for file in glob.glob(pattern, recursive=True) if Path(file).is_file())
    if not found:
        raise SparseRingError(f"text: {pattern!r} matches no file; give a file, a pattern or a folder of {', '.join(_KNOWN)}")
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
    if not batch:
        return []
    # verbose=False: documents longer than the tokenizer's model_max_length are meant to be cut into rows later
    rows = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [np.array([*row, tokenizer.eos_token_id], dtype=np.int32) for row in rows]


class _Tokenize:
    """Batches of documents to token ids and their count; the end-of-text token stands behind each text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if "text" in batch:
            rows = tokenize_documents([text for text in batch["text"] if text], self.tokenizer)
        else:
            rows = [np.asarray(ids, dtype=np.int32) for ids in batch["input_ids"] if len(ids)]
        return {"input_ids": rows, "length": [len(row) for row in rows]}


def tokenize(documents: Any, tokenizer: PreTrainedTokenizerBase, *, workers: int = 1) -> Any:
    """Token ids of documents as a dataset: ``input_ids`` int32 and ``length``, documents without a token left out.

    What was tokenized once by the same tokenizer is read again from the cache of ``datasets``.

    Args:
        documents: of :func:`load_documents`. workers: processes that tokenize; a stream has one.
    """
    options: dict[str, Any] = {"batched": True, "batch_size": _BATCH_DOCUMENTS, "remove_columns": _column_names(documents)}
    if isinstance(documents, Dataset):
        options |= {
            # told apart by the tokenizer's words: its pickle changes when it is used
            "new_fingerprint": Hasher.hash([documents._fingerprint, _identity(tokenizer), "tokens"]),
            "num_proc": max(1, min(workers, len(documents) // _BATCH_DOCUMENTS)),
            "writer_batch_size": _BATCH_DOCUMENTS,
            "desc": "tokenizing",
        }
        options["num_proc"] = options["num_proc"] if options["num_proc"] > 1 else None  # none: in this process
    return documents.map(_Tokenize(tokenizer), features=_TOKENS, **options)


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    return Hasher.hash([rules, tokenizer.eos_token_id])
