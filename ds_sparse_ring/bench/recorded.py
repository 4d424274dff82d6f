"""An index that the real selector chose from a model's queries and keys, kept in a small file for benchmarks.

It is measured at the length it was recorded at. It is not stretched to longer sequences: where a model's columns and diagonals
would lie there is not known.

Shapes: H query heads, K key/value heads, S tokens of one document, D head size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VerticalSlash
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.select import select_index

_TENSORS = ("diagonal_ptr", "diagonal_values", "column_ptr", "column_values")


@dataclass(frozen=True)
class RecordedIndex:
    """An index with the shape of the layer that it comes from; ``source`` says in words which one."""

    index: VerticalSlash
    kv_heads: int
    head_size: int
    source: str

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.index.patterns * self.index.heads_per_pattern

    def save(self, path: Path) -> None:
        """Write a file for `load`: segments, pointers and values, and no queries or keys."""
        index = self.index
        torch.save(
            {
                "segments": [asdict(s) for s in index.segments],
                "patterns": index.patterns,
                "heads_per_pattern": index.heads_per_pattern,
                "kv_heads": self.kv_heads,
                "head_size": self.head_size,
                "source": self.source,
                **{name: getattr(index, name).to("cpu", torch.int32) for name in _TENSORS},
            },
            path,
        )

    @classmethod
    def load(cls, path: Path) -> RecordedIndex:
        """Read what `save` wrote, onto the CPU.

        Raises:
            SparseRingError: the file is something else.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            segments = tuple(Segment(**s) for s in content["segments"])
            tensors = [content[name].long() for name in _TENSORS]
            index = VerticalSlash(segments, content["patterns"], content["heads_per_pattern"], *tensors)
            return cls(index, content["kv_heads"], content["head_size"], content["source"])
        except Exception as error:  # torch raises what the bytes of another file happen to mean
            raise SparseRingError(f"{path}: no recorded index: {error!r}; make one with RecordedIndex.save") from error


def record_index(q: Tensor, k: Tensor, config: SparseRingConfig, source: str) -> RecordedIndex:
    """What the selector of ``config`` keeps of one layer.

    Args:
        q: queries after RoPE ``[H, S, D]`` of one document; k: keys ``[K, S, D]``.
        source: model, layer and text, for the table.

    Raises:
        SparseRingError: the selector is "full" or names blocks one by one.
    """
    ring = SparseRing(config)
    ids = torch.zeros(1, q.shape[1], dtype=torch.int64)
    context = ring.bind(ring.sequence_batch({"input_ids": ids})["sparse_ring"])
    index = select_index(q, k, context, scale=q.shape[-1] ** -0.5)
    if not isinstance(index, VerticalSlash):
        raise SparseRingError(
            'selector: "full" keeps everything, others list blocks; record with kind "price", "top_p" or "fixed"'
        )
    return RecordedIndex(index, k.shape[0], q.shape[-1], source)
