"""From a batch to this rank's part of one sequence, and back.

A batch ``[B, S]`` becomes a stream of documents: padding (attention mask, left or right) is dropped, packed documents are told
by restarts of ``position_ids``, every row starts a document. Documents start on block boundaries and only the end of the
stream is padded, so any length works on any number of ranks. Labels are shifted once, here, before anything is cut: the last
token of a document predicts nothing. Positions are those of the whole document, whatever rank holds them.

Shapes: B rows, S tokens per row, n local tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ds_sparse_ring.documents import Segment, blocks_of, document_begins, make_segments
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import BLOCK, Layout, LayoutKind

IGNORE = -100
"""Label that is no target, as in PyTorch and Transformers."""

_USED = {"input_ids", "labels", "attention_mask", "position_ids"}
_WHOLE = (torch.int64, torch.int32)
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "input_ids": _WHOLE,
    "position_ids": _WHOLE,
    "labels": (torch.int64,),  # as cross_entropy takes them
    "attention_mask": (*_WHOLE, torch.bool, torch.uint8, torch.int8, torch.float32, torch.float16, torch.bfloat16),
}
# say again what position_ids say, for kernels of other libraries
_BOUNDS = {"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "seq_lengths"}
_REDUNDANT = _BOUNDS | {"max_length_q", "max_length_k", "length"}


@dataclass(frozen=True)
class DocumentRows:
    """Where a document stands in the original batch: tokens ``[begin, end)`` of ``row``."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True)
class Sequence:
    """How a batch was laid out: integers only, so that it pickles and travels with the batch.

    Attributes:
        shape: ``(B, S)`` of the original batch. documents: its documents in stream order.
        layout, rank: whose part the batch holds. segments: the selector's query groups.
        digest: checksum of the whole batch's tokens; ranks of a ring that drew different batches differ in it.
        highest_word: largest number of a token or label in the whole batch; a model's vocabulary must hold it.
    """

    shape: tuple[int, int]
    documents: tuple[DocumentRows, ...]
    layout: Layout
    rank: int
    segments: tuple[Segment, ...]
    digest: int
    highest_word: int

    @property
    def tokens(self) -> int:
        """Tokens of the original batch without its padding."""
        return sum(d.end - d.begin for d in self.documents)

    @cached_property
    def longest_document(self) -> int:
        """Tokens of the longest document."""
        return max(d.end - d.begin for d in self.documents)

    @property
    def causal_pairs(self) -> int:
        """(query, key) pairs of dense causal attention inside the documents, whole blocks counted, per head."""
        return sum(causal_triangle(d.end - d.begin) for d in self.documents)

    def positions(self) -> Tensor:
        """Place within its document of each token of this rank, counted from 0; int64 ``[n]``.

        Padding at the end of a document counts on. Differences within a document are those of the batch's ``position_ids``.
        """
        begins = torch.tensor([segment.begin for segment in self.segments])
        tokens = self.layout.token_ids(self.rank)
        segment = torch.searchsorted(begins, tokens // BLOCK, right=True) - 1
        return tokens - torch.tensor([s.document_begin * BLOCK for s in self.segments])[segment]

    def stream_positions(self) -> tuple[Tensor, Tensor]:
        """Flat index ``row * S + column`` of each original token, and its token id in the aligned stream; int64 ``[tokens]``."""
        width = self.shape[1]
        begins = document_begins([d.end - d.begin for d in self.documents])
        source = [torch.arange(d.row * width + d.begin, d.row * width + d.end) for d in self.documents]
        target = [b * BLOCK + torch.arange(d.end - d.begin) for b, d in zip(begins, self.documents, strict=True)]
        return torch.cat(source), torch.cat(target)

    def restore(self, stream: Tensor) -> Tensor:
        """``[B, S, ...]`` from a tensor over the aligned stream ``[blocks * BLOCK, ...]``; zeros where the batch was padded."""
        source, target = self.stream_positions()
        out = stream.new_zeros(self.shape[0] * self.shape[1], *stream.shape[1:])
        out[source.to(stream.device)] = stream[target.to(stream.device)]
        return out.unflatten(0, self.shape)


def causal_triangle(tokens: int) -> int:
    """(query, key) pairs of dense causal attention in one document of so many tokens, whole blocks counted."""
    blocks = blocks_of(tokens)
    return BLOCK * BLOCK * blocks * (blocks - 1) // 2 + blocks * BLOCK * (BLOCK + 1) // 2


def shard_batch(
    batch: Mapping[str, Any], *, kind: LayoutKind, ranks: int, rank: int, segment_tokens: int | None, group: int = 1
) -> dict[str, Any]:
    """This rank's part of a batch that all ranks of the ring hold in full.

    Args:
        batch: ``input_ids`` int ``[B, S]``; optional ``labels`` ``[B, S]`` (unshifted, -100 is no target), ``attention_mask``
            ``[B, S]`` (0 is padding, at one or both ends of a row), ``position_ids`` ``[B, S]`` (counting up within a document).
        kind, ranks, rank, group: the layout and the place in it. segment_tokens: see `SparseRingConfig`.

    Returns:
        ``input_ids``, ``position_ids`` ``[1, n]``, ``sparse_ring`` (a `Sequence`) and, if there were labels, ``labels`` and
        ``shift_labels`` ``[1, n]``, both already shifted.

    Raises:
        SparseRingError: unknown entries, shapes that differ, other dtypes, numbers that are no token, holes in the mask, an
            empty batch.
    """
    input_ids = _checked(batch)
    documents = _documents(batch, input_ids)
    lengths = [d.end - d.begin for d in documents]
    layout = Layout.for_blocks(kind, ranks, sum(blocks_of(length) for length in lengths), group)
    sequence = Sequence(
        shape=(input_ids.shape[0], input_ids.shape[1]),
        documents=documents,
        layout=layout,
        rank=rank,
        segments=make_segments(lengths, layout.blocks, segment_tokens),
        digest=zlib.crc32(input_ids.cpu().numpy().tobytes()),
        highest_word=_highest_word(batch),
    )
    local = {"input_ids": _place(input_ids, sequence, 0), "position_ids": _positions(batch, sequence)}
    if batch.get("labels") is not None:
        labels = _place(_shifted(batch["labels"], documents), sequence, IGNORE)
        local |= {"labels": labels, "shift_labels": labels.clone()}
    return {**local, "sparse_ring": sequence}


def _checked(batch: Mapping[str, Any]) -> Tensor:
    if not isinstance(batch, Mapping):
        raise SparseRingError(
            f"batch: it is a {type(batch).__name__}, not a mapping: give tensors by name, at least 'input_ids' [batch, sequence]"
        )
    given = {key for key, value in batch.items() if value is not None}
    if "sparse_ring" in given or "shift_labels" in given:
        raise SparseRingError(
            "batch: it is sharded or shifted already ('sparse_ring' or 'shift_labels' is in it): give each batch to "
            "SparseRing.sequence_batch or to its collator once, with unshifted 'labels'"
        )
    if "input_ids" not in given:
        raise SparseRingError(f"batch: 'input_ids' is missing; found {sorted(given)}: give tokens, embeddings cannot be sharded")
    unknown = given - _USED - _REDUNDANT
    if unknown:
        raise SparseRingError(
            f"batch: cannot shard {sorted(unknown)}; the entries understood are {sorted(_USED)}. Drop the others in the collator "
            "(a tokenizer's token_type_ids: return_token_type_ids=False)"
        )
    if given & _BOUNDS and "position_ids" not in given:
        raise SparseRingError(
            f"batch: {sorted(given & _BOUNDS)} tell documents apart, but only restarts of 'position_ids' are read: let the "
            "collator add them (DataCollatorWithFlattening: return_position_ids=True)"
        )
    input_ids = batch["input_ids"]
    for key in _USED & given:
        if not isinstance(batch[key], Tensor):
            raise SparseRingError(f"batch: '{key}' is a {type(batch[key]).__name__}, not a tensor: collate it first")
        if batch[key].shape != input_ids.shape or input_ids.dim() != 2:
            raise SparseRingError(
                f"batch: '{key}' has shape {tuple(batch[key].shape)}, 'input_ids' {tuple(input_ids.shape)}; "
                "all must be [batch, sequence]"
            )
        if batch[key].dtype not in _DTYPES[key]:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES[key])
            raise SparseRingError(f"batch: '{key}' has dtype {batch[key].dtype}, it must be {wanted}: convert it in the collator")
    return input_ids


def _highest_word(batch: Mapping[str, Any]) -> int:
    """Of tokens and labels; on a GPU, a number that the model has no word for would only be an assertion inside of a kernel."""
    highest, labels = int(batch["input_ids"].max()), batch.get("labels")
    if (lowest := int(batch["input_ids"].min())) < 0:
        raise SparseRingError(
            f"batch: 'input_ids' holds {lowest}, which is no token: fill up rows with the tokenizer's pad_token_id "
            f"({IGNORE} is for 'labels')"
        )
    if labels is None:
        return highest
    if bool(((labels < 0) & (labels != IGNORE)).any()):
        wrong = int(labels[(labels < 0) & (labels != IGNORE)][0])
        raise SparseRingError(f"batch: 'labels' holds {wrong}, which is no token: mark what is no target with {IGNORE}")
    return max(highest, int(labels.max()))


def _documents(batch: Mapping[str, Any], input_ids: Tensor) -> tuple[DocumentRows, ...]:
    attention_mask, position_ids = batch.get("attention_mask"), batch.get("position_ids")
    documents: list[DocumentRows] = []
    for row in range(input_ids.shape[0]):
        begin, end = _valid_range(attention_mask[row], row) if attention_mask is not None else (0, input_ids.shape[1])
        bounds = [begin, end]
        if position_ids is not None and end > begin:
            jumps = (position_ids[row, begin:end].diff() != 1).nonzero().flatten() + 1 + begin
            bounds = [begin, *jumps.tolist(), end]
        documents += [DocumentRows(row, a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
    if not documents:
        raise SparseRingError(
            "batch: it has no token that the attention mask keeps: 1 in 'attention_mask' is a token, 0 is padding; leave out "
            "rows without any"
        )
    return tuple(documents)


def _valid_range(mask_row: Tensor, row: int) -> tuple[int, int]:
    kept = mask_row.nonzero().flatten()
    if kept.numel() == 0:
        return 0, 0
    begin, end = int(kept[0]), int(kept[-1]) + 1
    if end - begin != kept.numel() or not ((mask_row == 0) | (mask_row == 1)).all():
        raise SparseRingError(
            f"batch: attention_mask of row {row} has holes or values other than 0 and 1; only padding at the ends of a row is "
            "supported. For packed documents restart position_ids at each document instead"
        )
    return begin, end


def _shifted(labels: Tensor, documents: tuple[DocumentRows, ...]) -> Tensor:
    """Labels moved one token to the left inside each document; the last token of a document has no target."""
    out = torch.full_like(labels, IGNORE)
    for d in documents:
        out[d.row, d.begin : d.end - 1] = labels[d.row, d.begin + 1 : d.end]
    return out


def _positions(batch: Mapping[str, Any], sequence: Sequence) -> Tensor:
    position_ids = batch.get("position_ids")
    if position_ids is None:
        position_ids = torch.zeros_like(batch["input_ids"])
        for d in sequence.documents:
            position_ids[d.row, d.begin : d.end] = torch.arange(d.end - d.begin, device=position_ids.device)
    return _place(position_ids, sequence, 0)


def _place(x: Tensor, sequence: Sequence, fill: int) -> Tensor:
    """``[B, S]`` -> this rank's ``[1, n]``, ``fill`` where the aligned stream has padding."""
    source, target = sequence.stream_positions()
    stream = x.new_full((sequence.layout.blocks * BLOCK,), fill)
    stream[target.to(x.device)] = x.flatten()[source.to(x.device)]
    return sequence.layout.shard(stream, sequence.rank)[None]
