"""Attention posts the transfers that its plan says: in this order, to and from these ranks, through these groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.comm import TAG_DKV, TAG_DKV_AHEAD, TAG_KV, TAG_KV_AHEAD, TAG_ULYSSES, Axes
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.plan import Transfer, ring_plan
from ds_sparse_ring.plan_run import Cargo, Posted, RankRun, Step, run_plans
from tests.common import DistributedTest

from .reference import bound, global_qkv

PAGES = {"host_gib": 0.05, "kv_page_tokens": 128}
PLANS: list[dict[str, Any]] = [
    {},
    {"layout": "zigzag"},
    {"inner_degree": 1},
    {"inner_degree": 2},
    {"inner_degree": 2, "inner": "gather"},
    {"inner_degree": 4, "inner": "gather", "layout": "zigzag"},
    {"ulysses_degree": 2},
    {"offload": PAGES},
    {"inner_degree": 2, "offload": PAGES},
    {"ulysses_degree": 2, "inner_degree": 2, "inner": "gather", "offload": PAGES},
]
TAGS = {"kv": TAG_KV, "kv_ahead": TAG_KV_AHEAD, "dkv": TAG_DKV, "dkv_ahead": TAG_DKV_AHEAD, "dkv_home": TAG_DKV_AHEAD}
Operation = tuple[str, int, str, int]
"""Send or receive, the other rank in the world, the group, the tag."""


def _groups(axes: Axes) -> dict[str, Any]:
    return {"flat": axes.ring_group} if axes.inner_size is None else {"inner": axes.inner_group, "outer": axes.outer_group}


def _posted(config: dict[str, Any]) -> tuple[SequenceContext, list[list[Operation]]]:
    """What both passes of a layer post beside the exchange of heads, a list for each launch."""
    _, sequence, context = bound([700], segment_tokens=256, selector={"kind": "full"}, **config)
    q, k, v = (sequence.layout.shard(x, sequence.rank, 1)[None].requires_grad_() for x in global_qkv(sequence, 4, 2, 16))
    launches: list[list[Operation]] = []
    batch = dist.batch_isend_irecv

    def recording(operations: list[dist.P2POp]) -> Any:
        launches.append([])
        for x in operations:
            (group,) = [name for name, group in _groups(context.axes).items() if group is x.group] or [""]
            launches[-1].append(("send" if x.op is dist.isend else "receive", x.peer, group, x.tag))
        return batch(operations)

    with pytest.MonkeyPatch.context() as patch:  # the fixture's patches would outlive the test on the ranks
        patch.setattr(dist, "batch_isend_irecv", recording)
        o = sparse_ring_attention(q, k, v, context, layer=0, scale=0.25)
        torch.autograd.grad(o.sum(), (q, k, v))
    return context, [launch for launch in launches if launch[0][3] < TAG_ULYSSES]


class _Run(RankRun):
    """Takes down what a rank posts."""

    def __init__(self, rank: int, everyone: Sequence[RankRun]) -> None:
        super().__init__(rank, everyone)
        self.launches: list[tuple[str, Sequence[Transfer]]] = []

    def post(self, variable: str, step: Step, transfers: Sequence[Transfer], cargo: Cargo) -> Posted:
        if transfers:
            self.launches.append((step[0], transfers))
        return super().post(variable, step, transfers, cargo)


def _planned(context: SequenceContext) -> list[list[Operation]]:
    axes, launches = context.axes, []
    ranks = range(axes.ring_size)
    plans = [ring_plan(context.layout, rank, axes.inner_size, axes.inner_kind, context.page_blocks) for rank in ranks]
    of_place = [place * axes.ulysses_size + axes.ulysses_rank for place in ranks]  # with a sequence that all ranks share
    for backward in (False, True):
        runs: list[_Run] = []
        runs.extend(_Run(rank, runs) for rank in ranks)
        run_plans(plans, runs, backward=backward)
        for name, transfers in runs[axes.ring_rank].launches:
            launch: list[Operation] = []
            for x in transfers:
                group = "flat" if axes.inner_size is None else x.level
                launch.append(("send", of_place[x.send_to], group, TAGS[name]))
                launch.append(("receive", of_place[x.receive_from], group, TAGS[name]))
            launches.append(launch)
    return launches


class TestPostedTransfers(DistributedTest):
    world_size = 4

    def test_are_those_of_the_plan_in_its_order(self) -> None:
        for config in PLANS:
            context, posted = _posted(config)
            assert posted == _planned(context), config
            assert len(posted) >= 3 and context.page_blocks == (2 if "offload" in config else None)
