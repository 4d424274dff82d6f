"""Every plan of 2, 4 and 8 GPUs through NCCL: gradients of the whole model, and the half-precision kernels over the ring.

Each plan is a test of its own (make test-gpus). What needs more GPUs than there are is skipped; the CPU suite has most of these
plans on gloo, in float64 (tests/unit/test_ring.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_sparse_ring.select import select_index
from ds_sparse_ring.ulysses import to_heads
from tests.common import DistributedTest
from tests.unit.reference import bound, dense_mask, global_qkv, masked_attention
from tests.unit.test_parity_gradients import PADDED, ZERO, Run, check_against_one_process
from tests.unit.test_ring import _attend, _of_all_heads, _shard

LAYOUTS: dict[str, dict[str, Any]] = {kind: {"layout": kind} for kind in ("striped", "zigzag", "contiguous")}


def _inner(size: int, kind: str = "ring", **others: Any) -> dict[str, Any]:
    return {"inner_degree": size, "inner": kind, **others}


PLANS: dict[int, dict[str, dict[str, Any]]] = {
    2: {**LAYOUTS, "gather-2": _inner(2, "gather"), "ulysses-2": {"ulysses_degree": 2}},
    4: {
        **LAYOUTS,
        "ring-2x2": _inner(2),
        "ring-2-gather-2": _inner(2, "gather"),
        "gather-4": _inner(4, "gather"),
        "ulysses-2-ring-2": {"ulysses_degree": 2},
        "ulysses-2-gather-2": _inner(2, "gather", ulysses_degree=2),
        "ulysses-4": {"ulysses_degree": 4},
    },
    8: {
        **LAYOUTS,
        "ring-2x4": _inner(4),
        "ring-4x2": _inner(2),
        "ring-2-gather-4": _inner(4, "gather"),
        "ring-4-gather-2": _inner(2, "gather"),
        "gather-8": _inner(8, "gather"),
        "ulysses-2-ring-4": {"ulysses_degree": 2},
        "ulysses-2-ring-2x2": _inner(2, ulysses_degree=2),
        "ulysses-2-gather-4": _inner(4, "gather", ulysses_degree=2),
        "ulysses-4-ring-2": {"ulysses_degree": 4},
    },
}


class _EveryPlan(DistributedTest):
    gpus_only = True
    timeout_s = 600  # the first one may compile kernels

    @pytest.mark.parametrize("zero", ["zero2_reduce_scatter", "zero3_reduce_scatter"])
    def test_gradients_of_the_whole_model_are_those_of_one_process(self, plan: str, zero: str) -> None:
        values = PLANS[dist.get_world_size()][plan]
        check_against_one_process(Run(ZERO[zero], "price", checkpointing=True, rows=[PADDED], **values))

    @pytest.mark.parametrize("selector", ["price", "full"])
    def test_in_half_precision_errors_are_at_most_those_of_pytorch(self, plan: str, selector: str) -> None:
        """Of outputs and gradients, as root mean squares of a rank's shard, against float64 under the same mask."""
        values = {**PLANS[dist.get_world_size()][plan], "selector": {"kind": selector}, "segment_tokens": 256}
        _, sequence, context = bound([1200, 300], **values)
        q, k, v = global_qkv(sequence, 8, 2, 128, dtype=torch.bfloat16)
        do, scale = global_qkv(sequence, 8, 2, 128, dtype=torch.bfloat16, seed=1)[0], 128**-0.5
        mine = to_heads([_shard(x, sequence)[0] for x in (q, k)], context.axes)
        index = select_index(mine[0], mine[1], context, scale=scale)
        visible = _of_all_heads(dense_mask(index, mine[0].shape[0], q.shape[1]), context.axes)
        got = _attend(q, k, v, do, sequence, context, scale)
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            qd, kd, vd = (x.to(dtype).requires_grad_() for x in (q, k, v))
            o = masked_attention(qd, kd, vd, visible, scale)
            results.append([o.detach(), *torch.autograd.grad(o, (qd, kd, vd), do.to(dtype))])
        for mine, exact, single in zip(got, *results, strict=True):
            exact, single = (_shard(x, sequence)[0].double() for x in (exact, single))
            assert mine.dtype == torch.bfloat16
            assert (mine.double() - exact).norm() <= (single - exact).norm()


@pytest.mark.parametrize("plan", PLANS[2])
class TestOnTwoGPUs(_EveryPlan):
    world_size = 2


@pytest.mark.parametrize("plan", PLANS[4])
class TestOnFourGPUs(_EveryPlan):
    world_size = 4


@pytest.mark.parametrize("plan", PLANS[8])
class TestOnEightGPUs(_EveryPlan):
    world_size = 8
