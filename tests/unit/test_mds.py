"""MDS shards, written here byte by byte: what is in them comes out, and what is not whole is refused."""

from __future__ import annotations

import gzip
import importlib.util
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.train import mds
from ds_sparse_ring.train.data import load_documents

Column = tuple[str, str, int | None]
TOKENS: Column = ("input_ids", "ndarray:uint32", None)
INDICES: Column = ("indices", "ndarray", None)


def uint32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def tokens(*ids: int) -> bytes:
    """An array of uint32 with one dimension, whose length is a byte."""
    return bytes([1 << 2 | 0, len(ids)]) + uint32(*ids)


def indices(*bounds: tuple[int, int]) -> bytes:
    """An array [n, 2] that says of itself: int64 (65), two dimensions, which are uint16 (code 1)."""
    flat = [x for pair in bounds for x in pair]
    return bytes([65, 2 << 2 | 1]) + struct.pack("<2H", len(bounds), 2) + struct.pack(f"<{len(flat)}q", *flat)


def write_shard(
    folder: Path, columns: list[Column], samples: list[list[bytes]], pack: Callable[[bytes], bytes] | None = None, kind: str = ""
) -> Path:
    """One more shard of a folder, ``pack``ed as ``kind`` says; its file."""
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "index.json"
    found: dict[str, Any] = json.loads(index.read_text()) if index.exists() else {"version": 2, "shards": []}
    names = ("column_names", "column_encodings", "column_sizes")
    entry: dict[str, Any] = {"version": 2, "format": "mds", "samples": len(samples), "compression": kind or None}
    entry |= {name: [column[i] for column in columns] for i, name in enumerate(names)}
    encoded = []
    for values in samples:
        sizes = [len(value) for value, (_, _, size) in zip(values, columns, strict=True) if size is None]
        encoded.append(uint32(*sizes) + b"".join(values))
    head = json.dumps(entry).encode()
    begin = 4 + 4 * (len(samples) + 1) + len(head)
    offsets = [begin + sum(map(len, encoded[:i])) for i in range(len(samples) + 1)]
    raw = uint32(len(samples), *offsets) + head + b"".join(encoded)
    path = folder / f"shard.{len(found['shards']):05}.mds"
    entry |= {"raw_data": {"basename": path.name, "bytes": len(raw), "hashes": {}}, "zip_data": None}
    if pack is not None:
        path = path.with_name(f"{path.name}.{kind.partition(':')[0]}")
        raw = pack(raw)
        entry["zip_data"] = {"basename": path.name, "bytes": len(raw), "hashes": {}}
    path.write_bytes(raw)
    found["shards"].append(entry)
    index.write_text(json.dumps(found))
    return path


def read(path: Path, column: str = "input_ids") -> list[Any]:
    """All documents, which a stream and a data set must have alike."""
    both = [[row[column] for row in load_documents([path], streaming=streaming)] for streaming in (True, False)]
    streamed, whole = ([x if isinstance(x, str) else np.asarray(x).tolist() for x in rows] for rows in both)
    assert streamed == whole
    return whole


def test_tokens_are_cut_at_their_indices_among_other_columns(tmp_path: Path) -> None:
    columns: list[Column] = [("domain", "str", None), INDICES, TOKENS, ("length", "int", 8), ("more", "pkl", None)]
    first = [b"books", indices((0, 2), (2, 5)), tokens(7, 8, 9, 1, 70000), struct.pack("<q", 5), b"never read"]
    second = [b"", indices((1, 3)), tokens(4, 5, 6), struct.pack("<q", 3), b""]
    write_shard(tmp_path / "mds", columns, [first, second])
    write_shard(tmp_path / "mds", columns, [])
    write_shard(tmp_path / "mds", [TOKENS], [[tokens(11)]])
    assert read(tmp_path / "mds") == [[7, 8], [9, 1, 70000], [5, 6], [11]]


@pytest.mark.parametrize(
    ("encoding", "size", "value"),
    [
        ("ndarray:uint16:3", 6, struct.pack("<3H", 1, 2, 60000)),
        ("ndarray:int64", None, bytes([1 << 2 | 2]) + uint32(3) + struct.pack("<3q", 1, 2, 60000)),
        ("ndarray", None, bytes([33, 2 << 2 | 3]) + struct.pack("<2Q", 1, 3) + struct.pack("<3i", 1, 2, 60000)),
    ],
)
def test_arrays_say_as_much_of_themselves_as_their_encoding_leaves_open(
    encoding: str, size: int | None, value: bytes, tmp_path: Path
) -> None:
    write_shard(tmp_path / "mds", [("input_ids", encoding, size)], [[value], [value]])
    assert read(tmp_path / "mds") == [[1, 2, 60000]] * 2


def test_text_is_read_from_folders_in_folders_beside_files(tmp_path: Path) -> None:
    """ProLong's layout: a folder of shards for each domain, some of them without a sample."""
    text: list[Column] = [("text", "str", None)]
    write_shard(tmp_path / "code" / "long", text, [["ünïcödé".encode()]])
    write_shard(tmp_path / "books", text, [[b"one"], [b"two"]])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "index.json").write_text('{"version": 2, "shards": []}')
    Dataset.from_dict({"text": ["saved"]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "code.txt").write_text("file")
    (tmp_path / "index.json").write_text('{"text": "a document of that name"}')
    assert read(tmp_path, "text") == ["one", "two", "ünïcödé", "file", "a document of that name", "saved"]
    with pytest.raises(SparseRingError, match="without a sample"):
        load_documents([tmp_path / "empty"])


def test_compressed_shards_are_read_and_a_decompressed_file_comes_first(tmp_path: Path) -> None:
    packed = write_shard(tmp_path / "mds", [TOKENS], [[tokens(1, 2)]], gzip.compress, "gz")
    write_shard(tmp_path / "mds", [TOKENS], [[tokens(3)]])
    assert read(tmp_path / "mds") == [[1, 2], [3]]
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.write_bytes(b"")
    assert read(tmp_path / "mds") == [[1, 2], [3]]


def test_shards_compressed_by_zstandard(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    for with_size in (True, False):
        compressor = zstandard.ZstdCompressor(level=3, write_content_size=with_size)
        packed = write_shard(tmp_path / "mds", [TOKENS], [[tokens(1, 2)]], compressor.compress, "zstd:3")
    assert read(tmp_path / "mds") == [[1, 2]] * 2
    packed.write_bytes(bytes(packed.stat().st_size))
    with pytest.raises(SparseRingError, match="sample 0 of .*shard.00001.mds.zstd cannot be read .*anew"):
        list(load_documents([tmp_path / "mds"], streaming=True))


def test_shards_that_nothing_here_decompresses_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for kind, message in (("zstd:3", "zstandard.*pip install zstandard"), ("br", "'br', which is not known here")):
        folder = tmp_path / kind.partition(":")[0]
        write_shard(folder, [TOKENS], [[tokens(1)]], bytes, kind)
        with pytest.raises(SparseRingError, match=f"{message}.*or decompress each .* to shard.00000.mds"):
            load_documents([folder])


def test_shards_that_are_not_what_the_index_says_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = write_shard(tmp_path, [TOKENS], [[tokens(1, 2)]])
    whole, index = path.read_bytes(), tmp_path / "index.json"
    path.write_bytes(whole[:-1])
    with pytest.raises(SparseRingError, match=f"has {len(whole) - 1} bytes, and index.json says {len(whole)}: fetch it anew"):
        load_documents([tmp_path])
    path.unlink()
    with pytest.raises(SparseRingError, match=r"lacks shard.00000.mds, .*fetch all shards"):
        load_documents([tmp_path])
    path.write_bytes(whole)
    index.write_text(index.read_text().replace('"samples"', '"number"'))
    with pytest.raises(SparseRingError, match="entry 0 of .*index.json is not that of an MDS shard .*'samples'"):
        load_documents([tmp_path])
    index.write_text(index.read_text().replace('{"version": 2, "format"', '{"version": 1, "format"'))
    with pytest.raises(SparseRingError, match="version 1: write them anew in version 2"):
        load_documents([tmp_path])


@pytest.mark.parametrize(
    ("columns", "values", "message"),
    [
        ([("ids", "ndarray", None)], [tokens(1)], r"has the columns \['ids'\]; 'text' or 'input_ids' is needed"),
        ([("input_ids", "bytes", None)], [b"1"], "'input_ids' of .* is encoded as 'bytes'.*tokens as 'ndarray'"),
        ([("text", "pkl", None)], [b"1"], "'text' of .* is encoded as 'pkl'.*write text as 'str'"),
        ([("input_ids", "ndarray:object", None)], [b"1"], "is encoded as 'ndarray:object'"),
        ([("text", "str", None)], [b"\xff"], "sample 0 of .*shard.00000.mds cannot be read .*utf-8"),
        ([TOKENS], [tokens(1, 2)[:-1]], "sample 0 of .* cannot be read"),
        ([("input_ids", "ndarray", None)], [b"\x01"], "sample 0 of .* cannot be read"),
        ([("input_ids", "ndarray:uint32:1", 4), ("x", "int", 8)], [uint32(1), b""], "columns take 12 bytes, and it has 4"),
        ([TOKENS], [tokens(2**31)], "'input_ids' in .* no tokens but uint32: whole numbers below"),
        ([("input_ids", "ndarray:float32:1", 4)], [struct.pack("<f", 1)], "'input_ids' in .* no tokens but float32"),
        ([TOKENS, INDICES], [tokens(1, 2), indices((0, 3))], "'indices' in .* no begins and ends within 2 tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_samples_that_hold_something_else_are_refused(
    columns: list[Column], values: list[bytes], message: str, tmp_path: Path
) -> None:
    write_shard(tmp_path, columns, [values])
    for streaming in (True, False):
        with pytest.raises(SparseRingError, match=message):
            list(load_documents([tmp_path], streaming=streaming))


def test_a_file_of_other_samples_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path, [TOKENS], [[tokens(1, 2)]])
    path.write_bytes(uint32(2) + path.read_bytes()[4:])
    index = mds.read_index(tmp_path)
    assert index is not None
    with pytest.raises(SparseRingError, match="1 samples are not in it"):
        list(mds.open_shards(tmp_path, index)[0].rows(("input_ids",)))
