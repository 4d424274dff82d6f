"""Dense attention through one adapter: documents, log-sum-exp and gradients against float64; which library is picked."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.kernels.dense import DenseAttention, DenseCase, available_dense, best_dense, document_rows
from ds_sparse_ring.kernels.dense_backends import DenseBackend

from .reference import check_dense


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "total"), [(None, 200), ([64, 128, 64], 256), ([128, 1, 70], 256)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 2, 64), (2, 2, 40), (8, 1, 96)])
def test_output_log_sum_exp_and_gradients_err_no_more_than_pytorch(
    dtype: torch.dtype, rows: list[int] | None, total: int, heads: int, kv_heads: int, head_size: int
) -> None:
    dense = best_dense(DenseCase(torch.device("cpu"), dtype, head_size, heads, kv_heads))
    assert dense.name == "torch-cpu"
    check_dense(dense, torch.device("cpu"), dtype, rows, total, heads, kv_heads, head_size)


def test_every_library_says_why_it_cannot_be_used() -> None:
    case = DenseCase(torch.device("cpu"), torch.bfloat16, 128, 8, 2)
    status = {s.name: s for s in available_dense(case)}
    assert [name for name, s in status.items() if s.usable] == ["torch-cpu"]
    assert all(s.why_not for s in status.values() if not s.usable)
    assert status["torch-cpu"].version == torch.__version__
    with pytest.raises(SparseRingError, match="torch-flash: runs on CUDA only"):
        best_dense(case, "torch-flash")
    with pytest.raises(SparseRingError, match="unknown library 'fast'; use one of flash-attn-4"):
        best_dense(case, "fast")


def test_a_version_outside_of_the_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_sparse_ring.kernels.dense_backends._installed", {"flash-attn": "2.6.3"}.get)
    why_not = {s.name: s.why_not for s in available_dense(DenseCase(torch.device("cpu"), torch.bfloat16, 128, 8, 2))}
    assert why_not["flash-attn-2"] == "2.6.3 is installed, >=2.7,<3 is needed"
    assert why_not["flash-attn-4"] == "not installed"


class WritesPlusInfinity:
    """A library that does with rows of zeros what FlashAttention 2 does with rows without a key."""

    name = "plus-infinity"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(q.shape[1])
        empty = (q == 0).all(2)
        return torch.ones_like(q), torch.zeros(q.shape[:2]).masked_fill(empty, float("inf"))

    def backward(self, do: torch.Tensor, q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        self.seen.append(q.shape[1])
        return (torch.ones_like(q),) * 3


def test_rows_of_padding_are_not_shown_to_a_library() -> None:
    library = WritesPlusInfinity()
    dense, x = DenseAttention(cast(DenseBackend, library)), torch.ones(1, 256, 8)
    x[:, 192:] = 0  # behind the documents: rows without a key
    o, lse = dense.forward(x, x, x, scale=1.0, rows=[64, 128])
    assert (o[:, :192] == 1).all() and (o[:, 192:] == 0).all()
    assert (lse[:, :192] == 0).all() and (lse[:, 192:] == float("-inf")).all()
    for gradient in dense.backward(x, x, x, x, o, lse, scale=1.0, rows=[64, 128]):
        assert (gradient[:, :192] == 1).all() and (gradient[:, 192:] == 0).all()
    assert library.seen == [64, 128] * 2


def test_documents_take_whole_blocks_and_must_fit() -> None:
    assert document_rows(make_segments([100, 64, 300], 12, 128)) == [128, 64, 320]
    dense, x = best_dense(DenseCase(torch.device("cpu"), torch.float32, 8, 1, 1)), torch.zeros(1, 64, 8)
    for rows in ([65], [10, 0]):
        with pytest.raises(SparseRingError, match="each needs a row, all must fit"):
            dense.forward(x, x, x, scale=1.0, rows=rows)
