"""What the fast selection knows before it sees a query: integers of the layout, made on the host once and kept on the device.

A *group* is the probe of one segment; its keys are a run of this rank's local blocks (in every layout local order is ascending
order). A *chunk* is a part of such a run, the work of one program. *Slots* number what is chosen from, in the order of the
index: blocks of key tokens by (segment, pattern, block), block diagonals by (segment, pattern, offset).

Shapes: G groups, S segments, P patterns, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.documents import Segment, blocks_of
from ds_sparse_ring.layout import BLOCK, Layout
from ds_sparse_ring.select.probe import probe_groups, target_segment

DIAGONAL_TILE = 128
"""Block diagonals that one program treats."""

_PROGRAMS = 4096  # about as many as keep a large GPU busy with work to spare
_MIN_CHUNK, _MAX_CHUNK = 4, 64
_ANCHOR_BLOCKS = 3

_Chunk = tuple[int, int, int]  # group, first and last + 1 block

# columns of Tables.groups
ROW_FIRST, ROW_COUNT, LOCAL_BEGIN, TILES, SLOT, CHUNK_BEGIN, CHUNK_END, EARLIER = range(8)
TARGET, DOCUMENT_BEGIN, KEY_END, SINK_CUT, SINK_END, REACH, REACH_SLOT, OFFSET_CHUNK_BEGIN, OFFSET_CHUNK_END = range(8, 17)
ANCHOR_BEGIN, ANCHOR_END = range(17, 19)
GROUP_FIELDS = 19
# columns of Tables.segments
SOURCE, FORCED, SEGMENT_REACH, SEGMENT_SLOT = range(4)
SEGMENT_FIELDS = 4


@dataclass(frozen=True)
class Tables:
    """Static integers of a selection, int64 tensors on the device unless said otherwise.

    Attributes:
        rows: ``[G * 64]`` local row of each probe query, 0 where there is none; held: bool ``[G * 64]``, if this rank has it.
        valid: bool ``[G * 64]``; a group of fewer than 64 queries leaves the rest invalid.
        groups: ``[G, GROUP_FIELDS]``: first row (token) and number of rows; first local key block and number of them; first slot
            (per pattern: times P); range of chunks; how many of the key blocks lie before the rows' first block; target segment
            or -1; document's first block; block one past the probed keys; token one past what counts as sink; token one past
            the sinks that are forced; blocks that the probe reaches, first slot of its offsets, range of its offset chunks; range
            of its anchor chunks.
        chunks: ``[C, 3]`` group, first and last + 1 local block. offset_chunks: the same over blocks of token offsets.
        anchor_chunks: the same over the few key blocks that hold much of the mass, as a rule: the first one and the last ones.
        key_blocks: global number of each local block. local_of: local number of each global block, -1 if absent.
        segments: ``[S, SEGMENT_FIELDS]``: group that chooses for it or -1, forced diagonals, reach in blocks, first slot.
        diagonal_tiles: ``[tiles, 2]`` segment and first offset.
        column_rows, diagonal_rows: ``[S * P + 1]`` first slot of each row of the index.
        column_slots, diagonal_slots, offset_slots: numbers of slots. host_groups: ``groups`` as tuples, on the host.
    """

    rows: Tensor
    held: Tensor
    valid: Tensor
    groups: Tensor
    chunks: Tensor
    offset_chunks: Tensor
    anchor_chunks: Tensor
    key_blocks: Tensor
    local_of: Tensor
    segments: Tensor
    diagonal_tiles: Tensor
    column_rows: Tensor
    diagonal_rows: Tensor
    column_slots: int
    diagonal_slots: int
    offset_slots: int
    host_groups: tuple[tuple[int, ...], ...]


def tables_of(context: SequenceContext, patterns: int, device: torch.device) -> Tables:
    """The tables of a sequence for this rank; made once per layout and kept."""
    return _tables(context.segments, context.layout, context.rank, context.config, patterns, device)


@lru_cache(maxsize=8)  # they take memory of the device
@torch.inference_mode(False)  # a cached tensor serves training, too, wherever it was first asked for
def _tables(
    segments: tuple[Segment, ...], layout: Layout, rank: int, config: SparseRingConfig, patterns: int, device: torch.device
) -> Tables:
    key_blocks = layout.block_ids(rank)
    probes = [(g.segment, int(g.rows[0]), g.rows.numel()) for g in probe_groups(segments, config)]
    groups, chunks, offset_chunks, anchors = _group_tables(segments, key_blocks, probes, config, patterns)
    tokens = torch.tensor([first for _, first, _ in probes])[:, None] + torch.arange(BLOCK)
    valid = torch.arange(BLOCK) < torch.tensor([count for _, _, count in probes])[:, None]
    rows, held = layout.locate(torch.where(valid, tokens, 0).flatten(), rank)
    held &= valid.flatten()
    local_of = torch.full((layout.blocks,), -1)
    local_of[key_blocks] = torch.arange(key_blocks.numel())
    sources = {group[TARGET]: g for g, group in enumerate(groups) if group[TARGET] >= 0}
    reaches = [1 if s.is_padding else s.end - s.document_begin for s in segments]
    reach_slots = [0, *accumulate(reaches)]
    per_segment = [
        (sources.get(s, -1), _forced(segment, reaches[s], config), reaches[s], reach_slots[s])
        for s, segment in enumerate(segments)
    ]
    tiles = [(s, first) for s, reach in enumerate(reaches) for first in range(0, reach, DIAGONAL_TILE)]
    column_blocks = [groups[sources[s]][TILES] if s in sources else 0 for s in range(len(segments))]

    def put(x: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(x, dtype=dtype).to(device)

    return Tables(
        rows=put(torch.where(held, rows, 0)),
        held=put(held, torch.bool),
        valid=put(valid.flatten(), torch.bool),
        groups=put(groups),
        chunks=put(chunks),
        offset_chunks=put(offset_chunks),
        anchor_chunks=put(anchors),
        key_blocks=put(key_blocks),
        local_of=put(local_of),
        segments=put(per_segment),
        diagonal_tiles=put(tiles),
        column_rows=put(_row_slots(column_blocks, patterns)),
        diagonal_rows=put(_row_slots(reaches, patterns)),
        column_slots=sum(column_blocks) * patterns,
        diagonal_slots=reach_slots[-1] * patterns,
        offset_slots=sum(group[REACH] for group in groups if group[TARGET] >= 0) * patterns,
        host_groups=tuple(groups),
    )


def _group_tables(
    segments: tuple[Segment, ...],
    key_blocks: Tensor,
    probes: list[tuple[int, int, int]],
    config: SparseRingConfig,
    patterns: int,
) -> tuple[list[tuple[int, ...]], list[_Chunk], list[_Chunk], list[_Chunk]]:
    """Rows of `Tables.groups` and of the three tables of chunks; ``probes`` are (segment, first token, rows)."""
    runs = []
    for s, first, _ in probes:
        begin, end = segments[s].document_begin, segments[s].end
        target = target_segment(segments, s, config)
        sink_cut = begin * BLOCK + config.sink_tokens
        sink_end = sink_cut if target is None else min(sink_cut, segments[target].valid_end)
        # a strictly causal probe may end before the sinks of its target do: their blocks are walked, too
        marks = torch.tensor([begin, max(end, blocks_of(sink_end)) if target is not None else end, first // BLOCK])
        low, high, rows_at = torch.searchsorted(key_blocks, marks).tolist()
        runs.append((low, high - low, max(rows_at - low, 0), -1 if target is None else target, sink_cut, sink_end))
    size = _chunk_blocks(sum(run[1] for run in runs) * patterns)
    groups: list[tuple[int, ...]] = []
    chunks: list[_Chunk] = []
    offset_chunks: list[_Chunk] = []
    anchors: list[_Chunk] = []
    slot = reach_slot = 0
    for (s, first, count), (low, tiles, earlier, target, sink_cut, sink_end) in zip(probes, runs, strict=True):
        g, begin, offset_begin = len(groups), len(chunks), len(offset_chunks)
        reach = segments[s].end - segments[s].document_begin
        chunks += [(g, b, min(b + size, low + tiles)) for b in range(low, low + tiles, size)]
        offset_chunks += [(g, b, min(b + size, reach)) for b in range(0, reach, size)]
        anchors += [(g, low, low + min(1, tiles)), (g, max(low + min(1, tiles), low + tiles - _ANCHOR_BLOCKS), low + tiles)]
        document_begin, key_end = segments[s].document_begin, segments[s].end
        groups.append(
            (first, count, low, tiles, slot, begin, len(chunks), min(earlier, tiles), target, document_begin, key_end)
            + (sink_cut, sink_end, reach, reach_slot, offset_begin, len(offset_chunks), len(anchors) - 2, len(anchors))
        )
        if target >= 0:
            slot, reach_slot = slot + tiles, reach_slot + reach
    return groups, chunks or [(0, 0, 0)], offset_chunks, anchors


def _chunk_blocks(work: int) -> int:
    """Key blocks of a chunk: long ones where there are programs enough."""
    size = _MIN_CHUNK
    while size < _MAX_CHUNK and work > 2 * size * _PROGRAMS:
        size *= 2
    return size


def _forced(segment: Segment, reach: int, config: SparseRingConfig) -> int:
    """Diagonals that are always on: the local ones; all of a segment that no strictly causal probe chooses for."""
    if not segment.is_padding and config.probe == "previous" and segment.opens_document:
        return reach
    return min(reach, config.local_blocks)


def _row_slots(blocks: list[int], patterns: int) -> Tensor:
    """First slot of each (segment, pattern), and one past the last, from the slots that each segment has per pattern."""
    sizes = torch.tensor(blocks).repeat_interleave(patterns)
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
