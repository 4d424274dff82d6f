"""Selection by every query on a GPU: the CUDA kernel against the reference in float64 and against Triton's."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.index import VerticalSlash
from ds_sparse_ring.kernels import get_kernel
from ds_sparse_ring.kernels.cuda_attention import CudaKernel
from ds_sparse_ring.op_builder import CUDAAttentionBuilder
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.select import select_index
from tests.every_query_checks import CASES, Case, check_wanted
from tests.unit.reference import global_qkv

pytestmark = pytest.mark.skipif(not CUDAAttentionBuilder().is_available(), reason="needs a Hopper GPU")

LONG = [
    pytest.param(Case((5000, 1, 3300), heads, kv_heads, per_pattern, size, dtype, window=2, segment_tokens=256, price=0.02))
    for heads, kv_heads, per_pattern in ((16, 2, 8), (14, 2, 1), (4, 4, 1))
    for size in (64, 128)
    for dtype in (torch.bfloat16, torch.float16)
]


def cuda_kernel() -> CudaKernel:
    kernel = get_kernel("cuda")
    assert isinstance(kernel, CudaKernel)
    return kernel


@pytest.mark.parametrize("case", [*CASES, *LONG])
def test_what_queries_want_is_marked_and_nothing_else(case: Case) -> None:
    check_wanted(cuda_kernel(), case, "cuda")


def chosen(backend: str, method: Literal["auto", "triton"], lengths: list[int]) -> VerticalSlash:
    selector = {"kind": "every_query", "price": 0.02}
    ring = SparseRing(SparseRingConfig(selector=selector, segment_tokens=256, heads_per_pattern=4, backend=backend))
    batch = ring.sequence_batch({"input_ids": torch.zeros(1, sum(lengths), dtype=torch.int64)})
    q, k, _ = (x.to("cuda", torch.bfloat16) for x in global_qkv(batch["sparse_ring"], 8, 2, 128))
    index = select_index(2 * q, k, ring.bind(batch["sparse_ring"]), scale=128**-0.5, method=method)
    assert isinstance(index, VerticalSlash)
    return index


def test_the_backend_decides_and_both_kernels_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[int] = []
    known = CudaKernel.mark_wanted

    def noted(self: CudaKernel, words: torch.Tensor, *rest: Any) -> None:
        marked.append(words.numel())
        known(self, words, *rest)

    monkeypatch.setattr(CudaKernel, "mark_wanted", noted)
    by_cuda = chosen("cuda", "auto", [20000])
    assert len(marked) == 1
    for by_triton in (chosen("cuda", "triton", [20000]), chosen("triton", "auto", [20000])):
        assert len(marked) == 1
        a, b = (x.column_values.numel() for x in (by_cuda, by_triton))
        assert abs(a - b) <= 1e-3 * b, "keys at the price differ by rounding"
