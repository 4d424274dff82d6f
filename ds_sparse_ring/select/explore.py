"""Random block diagonals beside what was chosen: a head that never reads a distance cannot learn to look there.

Each segment and pattern gets as many as the host knows beforehand, others in each step, layer and pattern, spread over the whole
document and equally likely; those that were chosen anyway add nothing. The host waits once for how many are left.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.index import VerticalSlash
from ds_sparse_ring.select.seeded import drawn, hashed

_SEED = 0x5EED


def explore(index: VerticalSlash, context: SequenceContext, count: int, step: int) -> VerticalSlash:
    """The index and ``count`` random diagonals of each segment and pattern (all of a segment that has fewer)."""
    segment, place, count_of, reach = _draws(context.segments, count, index.diagonal_ptr.device)  # [draws]
    pattern = torch.arange(index.patterns, device=segment.device)[:, None]
    number = context.axes.ulysses_rank * index.patterns + pattern  # a Ulysses group shares out the heads in order
    turn = hashed(_SEED, step, context.layer, segment, number)  # [P, draws]
    offset = 1 + drawn(hashed(turn, place), turn, place, count_of, reach - 1)
    return index.with_diagonals(torch.stack([segment * index.patterns + pattern, offset], -1).flatten(0, 1))


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # a cached tensor serves training, too, wherever it was first asked for
def _draws(segments: tuple[Segment, ...], count: int, device: torch.device) -> Tensor:
    """Of each draw of a pattern: its segment, number there, of how many, and blocks that the segment reaches; ``[4, draws]``."""
    rows = [torch.empty(4, 0, dtype=torch.int64)]
    for s, segment in enumerate(segments):
        reach = 1 if segment.is_padding else segment.end - segment.document_begin
        here = min(count, reach - 1)
        of_all = torch.tensor([s, 0, here, reach])[:, None].repeat(1, here)
        of_all[1] = torch.arange(here)
        rows.append(of_all)
    return torch.cat(rows, 1).to(device)
