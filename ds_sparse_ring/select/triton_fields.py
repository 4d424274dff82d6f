"""Columns of the tables of selection (`tables`), as constants that Triton kernels may read."""

import triton.language as tl

from ds_sparse_ring.select import tables

DIAGONAL_TILE = tl.constexpr(tables.DIAGONAL_TILE)
ROW_FIRST = tl.constexpr(tables.ROW_FIRST)
ROW_COUNT = tl.constexpr(tables.ROW_COUNT)
LOCAL_BEGIN = tl.constexpr(tables.LOCAL_BEGIN)
TILES = tl.constexpr(tables.TILES)
SLOT = tl.constexpr(tables.SLOT)
EARLIER = tl.constexpr(tables.EARLIER)
TARGET = tl.constexpr(tables.TARGET)
DOCUMENT_BEGIN = tl.constexpr(tables.DOCUMENT_BEGIN)
KEY_END = tl.constexpr(tables.KEY_END)
SINK_CUT = tl.constexpr(tables.SINK_CUT)
SINK_END = tl.constexpr(tables.SINK_END)
REACH = tl.constexpr(tables.REACH)
REACH_SLOT = tl.constexpr(tables.REACH_SLOT)
GROUP_FIELDS = tl.constexpr(tables.GROUP_FIELDS)
SOURCE = tl.constexpr(tables.SOURCE)
FORCED = tl.constexpr(tables.FORCED)
SEGMENT_REACH = tl.constexpr(tables.SEGMENT_REACH)
SEGMENT_SLOT = tl.constexpr(tables.SEGMENT_SLOT)
SEGMENT_FIELDS = tl.constexpr(tables.SEGMENT_FIELDS)
