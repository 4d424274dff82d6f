"""Heads exchanged chunk by chunk are those exchanged at once, also of fewer KV heads than ranks, and each chunk is under way
while the next one is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.comm import Axes, Place
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.meter import Meter
from ds_sparse_ring.ulysses import ChunkExchange, to_heads, to_tokens
from tests.common import DistributedTest, rank_device

from .reference import bound, global_qkv

TOKENS, D = 37, 8
CHUNKS = [slice(0, 15), slice(15, 30), slice(30, TOKENS)]


def _axes() -> Axes:
    return Axes.create(SparseRingConfig(ulysses_degree=dist.get_world_size()))


class TestExchangeByChunks(DistributedTest):
    world_size = [2, 3]

    def test_equals_the_exchange_at_once(self) -> None:
        axes = _axes()
        generator = torch.Generator().manual_seed(dist.get_rank())
        heads = 6 * axes.ulysses_size, axes.ulysses_size
        tensors = [torch.randn(count, TOKENS, D, generator=generator).to(rank_device()) for count in heads]
        exchange = ChunkExchange(axes, CHUNKS, Meter(axes), layer=0)
        wholes = exchange.to_heads([x.transpose(0, 1).contiguous().transpose(0, 1)[:, c] for x in tensors] for c in CHUNKS)
        expected = to_heads(tensors, axes)
        assert all(torch.equal(mine, other) for mine, other in zip(wholes, expected, strict=True))
        back = zip(*exchange.to_tokens(wholes, heads), strict=True)
        assert all(torch.equal(torch.cat(parts, 1), x) for parts, x in zip(back, tensors, strict=True))
        assert torch.equal(to_tokens(wholes, axes, [x.shape[0] for x in tensors])[0], tensors[0])

    @pytest.mark.world_size([2, 3, 4])
    def test_ranks_that_share_a_head_have_it_whole_and_what_they_give_back_is_summed_in_their_order(self) -> None:
        axes = _axes()
        size, mine = axes.ulysses_size, axes.ulysses_rank
        heads = 2 if size == 4 else 1
        same, generator = size // heads, torch.Generator().manual_seed(mine)
        x = torch.randn(heads, TOKENS, D, generator=generator).to(rank_device(), torch.bfloat16)
        meter = Meter(axes)
        meter.active = True
        exchange = ChunkExchange(axes, CHUNKS, meter, layer=0)
        (whole,) = exchange.to_heads([x[:, c]] for c in CHUNKS)
        of_ranks = axes.sequence_gather(x)
        assert torch.equal(whole, torch.cat([other[mine // same][None] for other in of_ranks], 1))
        for dtype in (torch.float32, torch.bfloat16):
            part = torch.randn(whole.shape, generator=generator).to(rank_device(), dtype)
            back = torch.cat([chunk for (chunk,) in exchange.to_tokens([part], [heads])], 1)
            mine_of = [other[:, mine * TOKENS : (mine + 1) * TOKENS].float() for other in axes.sequence_gather(part)]
            expected = [sum(mine_of[first + 1 : first + same], mine_of[first]) for first in range(0, size, same)]
            assert back.dtype == torch.float32 and torch.equal(back, torch.cat(expected))
            assert torch.equal(back, to_tokens([part], axes, [heads])[0])
        head_bytes = (size - 1) * TOKENS * D  # elements; one head of the own tokens to each other rank, but not to itself
        assert meter._counts["sent_heads_bytes"] == head_bytes * (2 + 4 + 2)


class TestAttentionOfSharedHeads(DistributedTest):
    """In bfloat16, so that a gradient that is rounded before it is summed is seen."""

    world_size = [2, 4]

    def test_gradients_have_the_bits_of_the_exchange_at_once(self) -> None:
        for ulysses, kv_heads in {2: [(2, 1)], 4: [(4, 2), (2, 1)]}[dist.get_world_size()]:  # the last one on a ring of 2
            ring, sequence, context = bound([450], segment_tokens=128, ulysses_degree=ulysses, heads_per_pattern=1)
            shards = [
                sequence.layout.shard(x, sequence.rank, 1)[None]
                for x in global_qkv(sequence, 4, kv_heads, 16, dtype=torch.bfloat16)
            ]
            do = torch.randn(shards[0].shape, generator=torch.Generator().manual_seed(sequence.rank)).to(shards[0])
            ring.meter.active = True
            expected = self._at_once(shards, do, context)
            ring.meter.active = False
            tokens, to_others = shards[0].shape[2], (ulysses - 1) / ulysses
            elements = 16 * tokens * to_others, 4 * 4 + 2 * ulysses, 2 * ulysses  # q, o, do, dq, k, v in 2 bytes; dk, dv in 4
            assert ring.meter.pop()["sent_heads_bytes"] == elements[0] * (2 * elements[1] + 4 * elements[2])
            chunks = [slice(at, min(at + 37, tokens)) for at in range(0, tokens, 37)]
            exchange = ChunkExchange(context.axes, chunks, context.meter, layer=0)
            wholes = [x[None].requires_grad_() for x in exchange.to_heads([x[0][:, c] for x in shards] for c in chunks)]
            of_shared: list[Tensor] = []
            exchanged = replace(context, heads_exchanged=True)
            o = sparse_ring_attention(*wholes, exchanged, layer=0, scale=0.25, kv_gradients=of_shared).transpose(1, 2)
            (whole_do,) = exchange.to_heads([do[0][:, c]] for c in chunks)
            (dq,) = torch.autograd.grad(o, wholes[:1], whole_do[None])
            assert dq.dtype == torch.bfloat16 and [x.dtype for x in of_shared] == 2 * [torch.float32]
            back = zip(*exchange.to_tokens([x[0] for x in (dq, *of_shared)], (4, kv_heads, kv_heads)), strict=True)
            got = [torch.cat(parts, 1).bfloat16() for parts in back]
            assert all(torch.equal(mine, other[0]) for mine, other in zip(got, expected, strict=True))

    def _at_once(self, shards: list[Tensor], do: Tensor, context: Any) -> tuple[Tensor, ...]:
        qkv = [x.clone().requires_grad_() for x in shards]
        o = sparse_ring_attention(*qkv, context, layer=0, scale=0.25).transpose(1, 2)
        return torch.autograd.grad(o, qkv, do)


class _Recorded:
    """In place of `Axes`: one rank of a group of two whose messages never leave it."""

    ulysses_size = 2

    def __init__(self, log: list[str]) -> None:
        self._log, self._sent = log, 0

    def swap_shares(self, shares: Any, place: Place) -> Any:
        log, number = self._log, self._sent
        self._sent += 1
        assert place == Place(7, False, chunk=number)
        log.append(f"send {number}")

        class Swap:
            sent_bytes = 0

            def wait(self) -> Any:
                log.append(f"wait {number}")
                return [list(of) for of in shares]

        return Swap()


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def exchange(log: list[str]) -> ChunkExchange:
    return ChunkExchange(cast(Axes, _Recorded(log)), CHUNKS, Meter(Axes(1, 0, 1)), layer=7)


def test_a_chunk_is_sent_before_the_one_before_is_waited_for(exchange: ChunkExchange, log: list[str]) -> None:
    def parts() -> Iterator[list[Tensor]]:
        for number, tokens in enumerate(CHUNKS):
            log.append(f"make {number}")
            yield [torch.zeros(2, tokens.stop - tokens.start, D)]

    exchange.to_heads(parts())
    assert log == ["make 0", "send 0", "make 1", "send 1", "wait 0", "make 2", "send 2", "wait 1", "wait 2"]


def test_the_next_chunk_is_on_its_way_back_while_one_is_used(exchange: ChunkExchange, log: list[str]) -> None:
    for number, _ in enumerate(exchange.to_tokens([torch.zeros(1, 2 * TOKENS, D)], [2])):
        log.append(f"use {number}")
    assert log == ["send 0", "send 1", "wait 0", "use 0", "send 2", "wait 1", "use 1", "wait 2", "use 2"]
