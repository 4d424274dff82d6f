"""MDS shards, the format of MosaicML's streaming data sets, in which ProLong's tokens come; read without that package.

``index.json`` of a folder has an entry for each shard: its columns, their encodings, their bytes where all values have as many,
and the names of its file and of that file compressed. The file, all numbers little-endian: n, its number of samples, and n + 1
offsets into the file (uint32), its entry once more, the samples. A sample: the bytes of each of its values that the entry does
not know (uint32), then its values. Source: streaming/base/format/mds of mosaicml-streaming 0.13.
"""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ds_sparse_ring.errors import SparseRingError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_UINT32 = np.dtype("<u4")
_CODES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4", 64: "u8", 65: "i8", 66: "f8"}
_DTYPES: dict[int, np.dtype[Any]] = {code: np.dtype(f"<{dtype}") for code, dtype in _CODES.items()}
"""Of arrays that say it themselves, by their first byte."""
_NAMES = {dtype.name: dtype for dtype in _DTYPES.values()}


@dataclass(frozen=True)
class Shard:
    """A file of samples.

    Attributes:
        path: the file that is there, compressed by ``compression`` unless that is None. samples: their number.
        columns: name, encoding and bytes, None where each value has its own, of each column, in their order.
    """

    path: Path
    compression: str | None
    samples: int
    columns: tuple[tuple[str, str, int | None], ...]

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return [name for name, _, _ in self.columns]

    def rows(self, wanted: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """The samples in their order, of each the columns that are wanted and there: text, or an array of any shape.

        Raises:
            SparseRingError: a file that is not what ``index.json`` says, a column that is neither text nor an array.
        """
        decoders = {name: _decoder(self.path, name, encoding) for name, encoding, _ in self.columns if name in wanted}
        number = 0
        try:
            data = self._bytes()
            offsets = data[4 : 4 * (self.samples + 2)].view(_UINT32)
            if int(data[:4].view(_UINT32)[0]) != self.samples or int(offsets[-1]) != len(data):
                raise ValueError(f"{self.samples} samples are not in it")
            for number in range(self.samples):
                yield self._row(data[offsets[number] : offsets[number + 1]], decoders)
        except (ValueError, IndexError, KeyError, OSError, EOFError) as error:
            raise SparseRingError(
                f"text: sample {number} of {self.path} cannot be read ({error}): fetch or write the file anew"
            ) from error

    def _row(self, sample: Bytes, decoders: dict[str, Callable[[Bytes], Any]]) -> dict[str, Any]:
        heads = sum(size is None for _, _, size in self.columns)
        own = iter(sample[: 4 * heads].view(_UINT32).tolist())
        begin, row = 4 * heads, {}
        for name, _, size in self.columns:
            end = begin + (next(own, 0) if size is None else size)
            if name in decoders:
                row[name] = decoders[name](sample[begin:end])
            begin = end
        if begin != len(sample):
            raise ValueError(f"its columns take {begin} bytes, and it has {len(sample)}")
        return row

    def _bytes(self) -> Bytes:
        if self.compression is None:
            return np.memmap(self.path, np.uint8, "r")
        return np.frombuffer(_DECOMPRESS[self.compression](self.path.read_bytes()), np.uint8)


def _zstd(packed: bytes) -> bytes:
    from zstandard import ZstdDecompressor, ZstdError

    try:
        return bytes(ZstdDecompressor().decompressobj().decompress(packed))  # the size need not stand in the file
    except ZstdError as error:
        raise ValueError(str(error)) from None


_DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {"zstd": _zstd, "gz": gzip.decompress, "bz2": bz2.decompress}


def _decoder(path: Path, name: str, encoding: str) -> Callable[[Bytes], Any]:
    kind, _, rest = encoding.partition(":")
    if kind == "str":
        return lambda raw: raw.tobytes().decode("utf-8")
    dtype, _, shape = rest.partition(":")
    if kind == "ndarray" and dtype in ("", *_NAMES):
        return partial(_array, _NAMES.get(dtype), tuple(map(int, shape.split(","))) if shape else None)
    raise SparseRingError(
        f"text: the column '{name}' of {path} is encoded as '{encoding}', which says nothing of text or tokens: write text as "
        "'str' and tokens as 'ndarray', or convert the shards to Parquet"
    )


def _array(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, raw: Bytes) -> np.ndarray[Any, Any]:
    """Values behind what the encoding leaves open: a byte for the dtype; a byte for number and dtype of dimensions, and these."""
    if dtype is None:
        dtype, raw = _DTYPES[int(raw[0])], raw[1:]
    if shape is None:
        count, size = int(raw[0]) >> 2, 1 << (int(raw[0]) & 3)
        shape, raw = tuple(raw[1 : 1 + count * size].view(f"<u{size}").tolist()), raw[1 + count * size :]
    return raw.view(dtype).reshape(shape)


def read_index(folder: str | Path) -> str | None:
    """Text of the ``index.json`` of a folder of MDS shards; None for other folders."""
    try:
        text = (Path(folder) / "index.json").read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError):
        return None
    shards = found.get("shards") if isinstance(found, dict) and "version" in found else None
    if not isinstance(shards, list):
        return None
    return text if all(isinstance(shard, dict) and shard.get("format") == "mds" for shard in shards) else None


def open_shards(folder: str | Path, index: str) -> list[Shard]:
    """The shards of a folder, in their order, looked at as far as that needs no reading of samples.

    Args:
        index: of :func:`read_index`.

    Raises:
        SparseRingError: a shard of another version or without its file, a file of another size, a compression that is not known
            or whose package is not installed.
    """
    shards = []
    for number, entry in enumerate(json.loads(index)["shards"]):
        try:
            shards.append(_shard(Path(folder), entry))
        except (KeyError, TypeError) as error:
            raise SparseRingError(
                f"text: entry {number} of {folder}/index.json is not that of an MDS shard (it lacks {error}): fetch it anew"
            ) from None
    return shards


def _shard(folder: Path, entry: dict[str, Any]) -> Shard:
    if entry["version"] != 2:
        raise SparseRingError(f"text: {folder} holds MDS shards of version {entry['version']}: write them anew in version 2")
    raw, packed = entry["raw_data"], entry.get("zip_data")
    file, compression = raw, None
    if packed and not (folder / raw["basename"]).is_file():
        file, compression = packed, entry["compression"].partition(":")[0]  # "zstd:7" has the level
    path = folder / file["basename"]
    if not path.is_file():
        raise SparseRingError(f"text: {folder} lacks {path.name}, which its index.json names: fetch all shards")
    if path.stat().st_size != file["bytes"]:
        raise SparseRingError(
            f"text: {path} has {path.stat().st_size} bytes, and index.json says {file['bytes']}: fetch it anew, whole"
        )
    _check_compression(path, raw["basename"], compression)
    columns = zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=False)
    return Shard(path, compression, entry["samples"], tuple((name, kind, size or None) for name, kind, size in columns))


def _check_compression(path: Path, raw: str, compression: str | None) -> None:
    if compression is None or (compression in _DECOMPRESS and (compression != "zstd" or importlib.util.find_spec("zstandard"))):
        return
    missing = "needs the package zstandard (pip install zstandard)" if compression == "zstd" else "is not known here"
    raise SparseRingError(
        f"text: {path} is compressed by '{compression}', which {missing}: or decompress each shard beside itself, this to {raw}"
    )
