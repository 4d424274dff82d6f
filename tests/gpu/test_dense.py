"""Dense attention on a GPU: every library that can be used here, forward, log-sum-exp and gradients against float64."""

from __future__ import annotations

import pytest
import torch

from ds_sparse_ring.kernels.dense import DenseCase, best_dense
from ds_sparse_ring.kernels.dense_backends import BACKENDS

from ..unit.reference import check_dense

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 4)])
def test_one_document_errs_no_more_than_pytorch(backend, dtype: torch.dtype, head_size: int, heads: int, kv_heads: int) -> None:
    _check(backend, dtype, None, 1000, heads, kv_heads, head_size)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("rows", [[64, 640, 128], [512, 64, 192]])
def test_documents_and_padding_err_no_more_than_pytorch(backend, rows: list[int]) -> None:
    _check(backend, torch.bfloat16, rows, 1024, 4, 2, 128)


def _check(backend, dtype: torch.dtype, rows: list[int] | None, total: int, heads: int, kv_heads: int, head_size: int) -> None:
    device = torch.device("cuda")
    case = DenseCase(device, dtype, head_size, heads, kv_heads)
    why_not = backend.refusal(case)
    if why_not is not None:
        pytest.skip(f"{backend.name}: {why_not}")
    check_dense(best_dense(case, backend.name), device, dtype, rows, total, heads, kv_heads, head_size)


def test_something_fast_can_be_used_for_bf16() -> None:
    assert best_dense(DenseCase(torch.device("cuda"), torch.bfloat16, 128, 16, 2)).name != "torch-cpu"
