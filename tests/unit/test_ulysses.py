"""Heads exchanged chunk by chunk are those exchanged at once, and each chunk is under way while the next one is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_sparse_ring.comm import Axes, Place
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.meter import Meter
from ds_sparse_ring.ulysses import ChunkExchange, to_heads, to_tokens
from tests.common import DistributedTest, rank_device

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
        back = zip(*exchange.to_tokens(wholes), strict=True)
        assert all(torch.equal(torch.cat(parts, 1), x) for parts, x in zip(back, tensors, strict=True))
        assert torch.equal(to_tokens(wholes, axes, [x.shape[0] for x in tensors])[0], tensors[0])


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
    for number, _ in enumerate(exchange.to_tokens([torch.zeros(1, 2 * TOKENS, D)])):
        log.append(f"use {number}")
    assert log == ["send 0", "send 1", "wait 0", "use 0", "send 2", "wait 1", "use 1", "wait 2", "use 2"]
