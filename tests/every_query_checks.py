"""Keys that queries want, marked by a backend on any device, against the reference in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ds_sparse_ring.batch import shard_batch
from ds_sparse_ring.config import EveryQuerySelector, WindowSelector
from ds_sparse_ring.kernels.cuda_attention import CudaKernel
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select import every_query
from tests.unit.reference import global_qkv, packed_batch


@dataclass(frozen=True)
class Case:
    """Documents of ``lengths``, marked on each rank of a ring; heads of a KV head and of a pattern."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    per_pattern: int
    head_size: int
    dtype: torch.dtype
    window: int = 1
    ranks: int = 1
    segment_tokens: int = 128
    price: float = 0.05
    sharpness: float = 2.0
    """Standard deviation of scores, about."""
    tolerance: float = 1e-3
    """Relative, of the price: keys so near to it may be marked or not."""


CASES = [
    pytest.param(Case((1,), 1, 1, 1, 128, torch.bfloat16), id="one-token"),
    pytest.param(Case((130, 1, 257, 64), 4, 2, 2, 64, torch.float16), id="documents"),
    pytest.param(Case((290, 130), 2, 2, 1, 128, torch.bfloat16, window=3), id="a-head-for-each-kv-head"),
    pytest.param(Case((333,), 3, 1, 3, 128, torch.float16), id="three-heads"),
    pytest.param(Case((200,), 5, 1, 5, 64, torch.bfloat16), id="five-heads-two-tiles"),
    pytest.param(Case((300,), 8, 1, 8, 128, torch.bfloat16), id="pattern-of-all-heads"),
    pytest.param(Case((300,), 8, 1, 1, 64, torch.float16, window=3), id="pattern-for-each-head"),
    pytest.param(Case((1000,), 1, 1, 1, 64, torch.bfloat16, segment_tokens=256), id="walk-longer-than-the-ring"),
    pytest.param(Case((300, 500), 2, 1, 2, 64, torch.bfloat16, ranks=3), id="ring-of-three"),
    # equal scores: five blocks' largest are just below the price of one, six are above
    pytest.param(
        Case((700,), 1, 1, 1, 64, torch.bfloat16, price=1 / 5.005, sharpness=0.0, tolerance=1e-4), id="just-above-the-price"
    ),
    pytest.param(Case((400,), 2, 1, 2, 64, torch.float16, sharpness=300.0, tolerance=1e-2), id="huge-scores"),
]


def check_wanted(kernel: CudaKernel, case: Case, device: torch.device | str) -> None:
    """Everything that is clearly wanted is marked, nothing that is clearly not, on every rank by itself."""
    for rank in range(case.ranks):
        sequence = shard_batch(
            packed_batch(list(case.lengths)), kind="striped", ranks=case.ranks, rank=rank, segment_tokens=case.segment_tokens
        )["sparse_ring"]
        q, k, _ = global_qkv(sequence, case.heads, case.kv_heads, case.head_size)
        patterns, scale = case.heads // case.per_pattern, case.head_size**-0.5
        q = (case.sharpness * q).unflatten(1, (-1, BLOCK))[:, sequence.layout.block_ids(rank)]
        rows = every_query._local_rows(sequence.layout, rank, sequence.segments, patterns, torch.device(device))
        filled_up = torch.arange(BLOCK) >= rows.valid.cpu()[:, None]
        q[:, filled_up] *= 50  # would want other keys
        q, k = (x.to(device, case.dtype) for x in (q.flatten(1, 2), k))
        q = q.transpose(0, 1).contiguous().transpose(0, 1)  # heads beside each other, as models have them
        window = WindowSelector(window_blocks=case.window, sink_tokens=0)
        slots = every_query._slots(sequence.segments, patterns, window, torch.device(device))
        selector = EveryQuerySelector(price=case.price, window_blocks=case.window)
        words = torch.zeros(slots.count, dtype=torch.int64, device=device)
        every_query._mark_by_cuda(kernel, words, q, k, rows, selector, patterns, scale)
        surely, perhaps = (torch.zeros_like(words) for _ in range(2))
        for bits, factor in ((surely, 1 + case.tolerance), (perhaps, 1 - case.tolerance)):
            near = selector.model_copy(update={"price": case.price * factor})
            every_query._mark_wanted(bits, q.double(), k.double(), rows, near, patterns, scale)
        assert not (surely & ~words).any(), "a key that is wanted is not marked"
        assert not (words & ~perhaps).any(), "a key that nobody wants is marked"
        assert count(perhaps & ~surely) <= 0.02 * count(surely), "the tolerance hides errors"
        assert count(words) > 0 or max(case.lengths) <= BLOCK


def count(words: Tensor) -> int:
    """Bits that are set."""
    return int(((words[:, None] >> torch.arange(BLOCK, device=words.device)) & 1).sum())
