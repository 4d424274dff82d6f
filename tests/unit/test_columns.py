"""Columns on their way over a ring: what arrives, what comes back, and what is sent for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ds_sparse_ring.batch import Sequence
from ds_sparse_ring.columns import ColumnGather, ColumnReturn
from ds_sparse_ring.comm import Axes
from ds_sparse_ring.index import VerticalSlash
from tests.common import DistributedTest, rank_device

from .reference import bound, global_qkv, random_index

HEADS, KV_HEADS, SIZE = 6, 2, 16


def _index(sequence: Sequence, columns: int) -> VerticalSlash:
    """On the rank's device."""
    made = random_index(sequence, HEADS, 1, columns=columns, diagonals=2)
    names = ("diagonal_ptr", "diagonal_values", "column_ptr", "column_values")
    return replace(made, **{name: getattr(made, name).to(rank_device()) for name in names})


class TestColumns(DistributedTest):
    world_size = [1, 3]

    @pytest.mark.parametrize("layout", ["striped", "zigzag", "contiguous"])
    def test_distinct_rows_travel_and_every_column_gets_and_gives_its_own(
        self, layout: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: list[torch.Size] = []
        for name in ("column_gather", "column_shares"):
            original = getattr(Axes, name)

            def noting(self, x, place, _original=original):
                given.append(x.shape)
                return _original(self, x, place)

            monkeypatch.setattr(Axes, name, noting)
        _, sequence, context = bound([500, 90, 300], segment_tokens=128, layout=layout)
        context.meter.active = True
        index = _index(sequence, columns=60)
        token, head = index.column_values, index.column_patterns() // (HEADS // KV_HEADS)
        _, k, v = global_qkv(sequence, HEADS, KV_HEADS, SIZE, dtype=torch.bfloat16)
        mine_k, mine_v = (sequence.layout.shard(x, sequence.rank, 1) for x in (k, v))
        mine_v = mine_v.transpose(0, 1).contiguous().transpose(0, 1)  # as projections leave it, token by token
        columns = ColumnGather(mine_k, mine_v, index, context).start().wait()
        assert columns is not None
        assert torch.equal(columns.k, k[head, token]) and torch.equal(columns.v, v[head, token])

        generator = torch.Generator().manual_seed(sequence.rank)
        parts = torch.randint(-9, 9, (2, token.numel(), SIZE), generator=generator).float().to(rank_device())
        back = ColumnReturn(columns, torch.float32, KV_HEADS, index, context)
        assert back.rows is not None and not back.rows.k.any() and back.rows.k.dtype == torch.float32
        back.rows.k.add_(parts[0])
        back.rows.v.add_(parts[1])
        back.send()
        dkv = torch.ones(2, *mine_k.shape, device=rank_device())
        back.add_to(dkv)
        total = context.axes.world_sum(parts.clone())  # integers: exact in any order
        whole = torch.ones(2, *k.shape, device=rank_device())
        for part, rows in zip(whole, total, strict=True):
            part.view(-1, SIZE).index_add_(0, head * k.shape[1] + token, rows)
        assert torch.equal(dkv, sequence.layout.shard(whole, sequence.rank, 2))

        distinct = torch.unique(head * k.shape[1] + token) % k.shape[1]
        most = max(int(sequence.layout.locate(distinct, rank)[1].sum()) for rank in range(dist.get_world_size()))
        assert distinct.numel() < 0.8 * token.numel()
        expected = [(most, 2, SIZE), (dist.get_world_size() * most, 2, SIZE)] if dist.get_world_size() > 1 else []
        assert [tuple(shape) for shape in given] == expected, "an alone rank sends nothing"
        others, rounds = dist.get_world_size() - 1, 1 if dist.get_backend() == "nccl" else 2  # gloo sums all on all ranks
        assert context.meter._counts["sent_columns_bytes"] == others * most * 2 * SIZE * (2 + rounds * 4)

    def test_a_later_pass_knows_how_many_rows_there_are(self) -> None:
        _, sequence, context = bound([500], segment_tokens=128)
        index = _index(sequence, columns=20)
        k = sequence.layout.shard(global_qkv(sequence, HEADS, KV_HEADS, SIZE)[1], sequence.rank, 1)
        first = ColumnGather(k, k, index, context).wait()
        index.forget()
        with pytest.MonkeyPatch.context() as patch:  # ranks serve other tests, too
            patch.setattr("ds_sparse_ring.columns.HostNumber", None)  # counting again would fail
            again = ColumnGather(k, k, index, context).wait()
        assert first is not None and again is not None and torch.equal(first.k, again.k)
