"""Keys and values in host memory, page by page: the gradients of attention without pages, nothing left behind, and the plan."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.batch import Sequence
from ds_sparse_ring.comm import Axes
from ds_sparse_ring.config import OffloadConfig
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import Layout
from ds_sparse_ring.pages import DeviceKV, HostKV
from ds_sparse_ring.plan import ring_plan
from ds_sparse_ring.slots import checkpoint_context_fn
from ds_sparse_ring.spill import Spill
from ds_sparse_ring.store import Store
from tests.common import DistributedTest, rank_device
from tests.offloading import GIB_OF_A_MIB

from .reference import bound, global_qkv

PRICE = {"kind": "price", "price": 2e-3}
FULL = {"kind": "full"}


def _offload(page_tokens: int | None, host_gib: float = 4 * GIB_OF_A_MIB) -> dict[str, Any]:
    return {"host_gib": host_gib, "kv_page_tokens": page_tokens}


def _parts(sequence: Sequence, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    qkv = global_qkv(sequence, heads, kv_heads, 16, dtype=dtype)
    return [sequence.layout.shard(x, sequence.rank, 1)[None].requires_grad_() for x in qkv]


def _layer(context: SequenceContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two calls in one function, the second one on what the first has made."""
    for number in range(2):
        q = q + sparse_ring_attention(q, k, v, context, layer=number, scale=0.25).transpose(1, 2)
    return q


def _results(
    lengths: list[int], heads: int, kv_heads: int, page_tokens: int | None, *, replayed: bool, dtype=torch.float64, **config: Any
) -> tuple[list[torch.Tensor], Store | None]:
    ring, sequence, context = bound(lengths, offload=_offload(page_tokens), **config)
    parts = _parts(sequence, heads, kv_heads, dtype)
    if replayed:
        out = checkpoint(_layer, context, *parts, use_reentrant=False, context_fn=checkpoint_context_fn)
    else:
        out = _layer(context, *parts)
    weights = torch.linspace(0, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    out.mul(weights).sum().backward()
    assert ring.spill is not None
    return [out.detach(), *(x.grad for x in parts)], ring.spill.store


def _check(lengths: list[int], heads: int, kv_heads: int, page_tokens: int, *, replayed: bool = False, **config: Any) -> None:
    """Paged and unpaged attention differ by the order of sums alone; every page came back once and is gone."""
    expected, _ = _results(lengths, heads, kv_heads, None, replayed=False, **config)
    got, store = _results(lengths, heads, kv_heads, page_tokens, replayed=replayed, **config)
    for mine, whole in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-11)
    assert store is not None
    _, sequence, context = bound(lengths, offload=_offload(page_tokens), **config)
    numbers, kept = store.numbers(), 0
    if replayed and context.config.checkpoint == "output":
        kept = 4  # o and lse of both layers
    assert numbers.to_host == numbers.to_device == 2 * len(context.plan.pages) + kept
    gc.collect()
    assert store.room("host") == 4 * 2**20


def _plans(world: int) -> list[dict[str, Any]]:
    plans: list[dict[str, Any]] = [{"layout": kind} for kind in ("striped", "zigzag", "contiguous")]
    plans += [{"inner_degree": world, "inner": "gather"}] * (world > 1)
    if world == 4:
        plans += [{"inner_degree": 2, "inner": kind} for kind in ("ring", "gather")]
        plans += [{"inner_degree": 2, "layout": "zigzag"}, {"inner_degree": 1}]
        plans += [{"ulysses_degree": 2}, {"ulysses_degree": 2, "inner_degree": 2, "inner": "gather"}, {"ulysses_degree": 4}]
    return plans


class TestParity(DistributedTest):
    world_size = [1, 2, 3, 4]

    @pytest.mark.slow(world_size=[4])
    def test_every_plan_with_documents_columns_and_shared_heads(self) -> None:
        for plan in _plans(dist.get_world_size()):
            _check([300, 90, 417], 4, 2, 128, segment_tokens=128, selector=PRICE, **plan)

    @pytest.mark.world_size([1, 3])
    def test_pages_of_any_size_and_the_full_index(self) -> None:
        for page_tokens in (64, 192, 1 << 20):
            _check([700], 4, 4, page_tokens, selector=FULL)
        _check([65], 2, 1, 64, selector=PRICE)

    @pytest.mark.world_size([1, 2])
    @pytest.mark.parametrize("keep", ["output", "index"])
    def test_replays(self, keep: str) -> None:
        _check([300, 390], 4, 1, 64, replayed=True, checkpoint=keep, segment_tokens=128, selector=PRICE)

    @pytest.mark.world_size([2])
    def test_one_page_gives_the_bits_of_none(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            config: dict[str, Any] = {"segment_tokens": 128, "selector": PRICE, "dtype": dtype}
            for ulysses in (1, 2):
                runs = [_results([700], 4, 1, page, replayed=False, ulysses_degree=ulysses, **config)[0] for page in (None, 1024)]
                assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

    @pytest.mark.world_size([1])
    @pytest.mark.parametrize("selector", [PRICE, FULL], ids=["price", "full"])
    def test_kernels_for_gpus_take_queries_before_and_behind_a_page(self, selector: dict[str, Any]) -> None:
        config: dict[str, Any] = {"segment_tokens": 128, "selector": selector, "dtype": torch.float32, "replayed": False}
        expected = _results([200, 120], 2, 1, None, backend="torch", **config)[0]
        got = _results([200, 120], 2, 1, 64, backend="triton", **config)[0]
        for mine, whole in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-4)

    @pytest.mark.world_size([3])
    def test_pages_give_the_same_bits_each_time_replayed_or_not(self) -> None:
        runs = [
            _results([700], 4, 2, 64, replayed=replayed, dtype=torch.float32, segment_tokens=128, selector=PRICE)[0]
            for replayed in (False, False, True)
        ]
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))

    @pytest.mark.world_size([2])
    def test_bfloat16_gradients_of_pages_are_rounded_once(self) -> None:
        exact, _ = _results([700], 4, 2, None, replayed=False, selector=FULL)
        for name, page_tokens in (("whole", None), ("pages", 64)):
            got, _ = _results([700], 4, 2, page_tokens, replayed=False, dtype=torch.bfloat16, selector=FULL)
            errors = [float((a.double() - b).square().mean().sqrt()) for a, b in zip(got[2:], exact[2:], strict=True)]
            if name == "whole":
                allowed = errors
            assert got[2].dtype == torch.bfloat16
        assert all(error <= 1.1 * most for error, most in zip(errors, allowed, strict=True))


def test_a_page_is_gone_once_it_was_taken_and_the_next_one_is_on_its_way() -> None:
    spill = Spill(OffloadConfig(host_gib=GIB_OF_A_MIB), lambda name: nullcontext())
    pages = ring_plan(Layout.for_blocks("striped", 1, 5), 0, page_blocks=2).pages
    k, v = torch.randn(2, 2, 5 * 64, 16, device=rank_device())
    host = HostKV(spill, pages, 2)
    assert DeviceKV(k, v, host).whole() == (k, v)
    left, fetched = spill.opened.numbers().bytes_now["host"], []
    for page in pages:
        assert torch.equal(host.load(page), torch.stack([k, v])[:, :, page.tokens])
        numbers = spill.opened.numbers()
        fetched.append(numbers.to_device)
        assert left - numbers.bytes_now["host"] == 2 * 2 * 16 * 4 * (page.tokens.stop - page.tokens.start)
        left = numbers.bytes_now["host"]
    assert left == 0 and fetched == [2, 3, 3], "each once, the next one ahead"


class TestWhatIsSentAndKept(DistributedTest):
    world_size = 2

    def test_the_ring_carries_the_same_bytes_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sent: list[int] = []
        exchange_all = Axes.exchange_all

        def counting(self, x, transfers, *named):
            sent.extend([x.numel() * x.element_size()] * len(transfers))
            return exchange_all(self, x, transfers, *named)

        monkeypatch.setattr(Axes, "exchange_all", counting)
        totals = []
        for page_tokens in (None, 128):
            sent.clear()
            _results([700], 2, 1, page_tokens, replayed=False, dtype=torch.float32, selector=FULL)
            totals.append((sum(sent), max(sent)))
        assert totals[1][0] == totals[0][0] and totals[1][1] == totals[0][1] // 3, "6 blocks of a shard, 2 of a page"

    def test_a_graph_that_is_dropped_takes_its_pages_along_and_evaluation_puts_none(self) -> None:
        ring, sequence, context = bound([700], offload=_offload(64), selector=PRICE)
        parts = _parts(sequence, 2, 1, torch.float32)
        out = _layer(context, *parts)
        assert ring.spill is not None and ring.spill.store is not None
        assert ring.spill.store.room("host") < 4 * 2**20
        del out
        gc.collect()
        assert ring.spill.store.room("host") == 4 * 2**20
        before = ring.spill.store.numbers().to_host
        with torch.no_grad():
            _layer(context, *parts)
        checkpoint(_layer, context, *parts, use_reentrant=False, context_fn=checkpoint_context_fn)
        assert ring.spill.store.numbers().to_host == before + 4, "o and lse of two layers, which a replay wants"

    def test_a_budget_that_is_too_small_says_what_it_takes(self) -> None:
        _, sequence, context = bound([700], offload=_offload(64, 8 * GIB_OF_A_MIB / 1024), selector=FULL)
        with pytest.raises(SparseRingError, match=r"needs \d+ bytes .*host_gib"):
            _layer(context, *_parts(sequence, 2, 1))

    def test_a_second_backward_pass_replays_or_is_refused(self) -> None:
        _, sequence, context = bound([200], offload=_offload(64), selector=PRICE)
        parts = _parts(sequence, 2, 1)
        out = checkpoint(_layer, context, *parts, use_reentrant=False, context_fn=checkpoint_context_fn).square().sum()
        first = torch.autograd.grad(out, parts, retain_graph=True)
        second = torch.autograd.grad(out, parts)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        out = _layer(context, *parts).square().sum()
        torch.autograd.grad(out, parts, retain_graph=True)
        with pytest.raises(SparseRingError, match="serve one backward pass"):
            torch.autograd.grad(out, parts)
