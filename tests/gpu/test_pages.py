"""Keys and values in host memory on a GPU: training steps with and without pages, memory, and no waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.slots import checkpoint_context_fn
from tests.unit.reference import bound

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 16384, 4, 4, 128
GIB = 0.5


def make(page_tokens: int | None, selector: dict[str, Any], **config: Any) -> SequenceContext:
    offload = {"host_gib": GIB, "kv_page_tokens": page_tokens}
    _, _, context = bound([TOKENS - 3000, 3000], offload=offload, selector=selector, segment_tokens=2048, **config)
    return context


def inputs(context: SequenceContext, dtype: torch.dtype) -> list[Tensor]:
    tokens = context.layout.blocks * 64
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, heads, tokens, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_() for shape in shapes]


def layer(context: SequenceContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for number in range(2):
        q = q + sparse_ring_attention(q, k, v, context, layer=number, scale=HEAD_SIZE**-0.5).transpose(1, 2)
    return q


def step(context: SequenceContext, dtype: torch.dtype, *, replayed: bool) -> list[Tensor]:
    """Output and gradients, twice: the slab and the allocator's memory are used again."""
    for _ in range(2):
        parts = inputs(context, dtype)
        if replayed:
            out = checkpoint(layer, context, *parts, use_reentrant=False, context_fn=checkpoint_context_fn)
        else:
            out = layer(context, *parts)
        out.float().square().sum().backward()
        results = [out.detach(), *(x.grad for x in parts)]
    return results


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("selector", [{"kind": "price", "price": 1e-3}, {"kind": "full"}], ids=["price", "full"])
def test_a_step_with_pages_is_the_step_without(selector: dict[str, Any], replayed: bool) -> None:
    whole = step(make(None, selector), torch.bfloat16, replayed=replayed)
    one_page = step(make(1 << 20, selector), torch.bfloat16, replayed=replayed)
    if selector["kind"] != "full":  # libraries do not repeat dq bit for bit
        assert all(torch.equal(a, b) for a, b in zip(one_page, whole, strict=True))
    paged = step(make(2048, selector), torch.bfloat16, replayed=replayed)
    for a, b in zip(paged, whole, strict=True):
        assert (a.float() - b.float()).norm() <= 2e-2 * b.float().norm()
    if selector["kind"] != "full":
        again = step(make(2048, selector), torch.bfloat16, replayed=replayed)
        assert all(torch.equal(a, b) for a, b in zip(again, paged, strict=True))


def test_the_backward_pass_does_not_wait_for_the_device() -> None:
    context = make(2048, {"kind": "price", "price": 1e-3})
    step(context, torch.bfloat16, replayed=False)  # tables are made, memory is pinned
    out = layer(context, *inputs(context, torch.bfloat16))
    loss = out.float().square().sum()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_pages_save_memory_between_and_within_the_passes() -> None:
    between, within = [], []
    for page_tokens in (None, 1024):
        context = make(page_tokens, {"kind": "price", "price": 1e-3})
        step(context, torch.bfloat16, replayed=False)
        parts = inputs(context, torch.bfloat16)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        q, k, v = parts
        out = layer(context, q * 1, k * 1, v * 1)  # nobody else holds these
        loss = out.float().square().sum()
        torch.cuda.synchronize()
        between.append(torch.cuda.memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        within.append(torch.cuda.max_memory_allocated() - before)
        del out, loss
    shard = KV_HEADS * TOKENS * HEAD_SIZE * 2
    assert between[0] - between[1] >= 1.25 * shard, f"{between} bytes: keys and values, but for copies under way"
    assert within[1] < within[0] - shard, f"{within} bytes"
