"""The libraries that the benchmark compares with compute their masks: a wrong list of tiles would only look fast."""

from __future__ import annotations

import pytest
import torch

from ds_sparse_ring.bench.accuracy import measure_errors
from ds_sparse_ring.bench.contenders import FlashSparse, Flex, Problem
from ds_sparse_ring.bench.patterns import pattern
from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.errors import SparseRingError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("kind", ["clustered", "columns"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("peer", ["flex-128", "fa4-128"])
def test_peers_err_no_more_than_pytorch_under_their_mask(peer: str, head_size: int, kind) -> None:
    index = pattern(kind, make_segments([2048], 32, 512), 4, density=0.3)
    problem = Problem.random(index, 2, head_size, torch.bfloat16, torch.device("cuda"))
    try:
        contender = FlashSparse(problem) if peer == "fa4-128" else Flex(problem)
    except SparseRingError as error:
        pytest.skip(str(error))
    for name, (own, in_torch) in measure_errors(problem, contender).items():
        assert own <= 2 * in_torch, name
