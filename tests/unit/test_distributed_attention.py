"""DeepSpeed's `DistributedAttention` around our ring, and ours in its place: outputs and gradients of one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention as DeepSpeedAttention
from deepspeed.utils import groups, safe_get_full_grad
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ds_sparse_ring.batch import IGNORE
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import FullIndex
from ds_sparse_ring.integrations.distributed_attention import DistributedAttention, RingLocalAttention
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.select import select_index
from ds_sparse_ring.slots import checkpoint_context_fn
from tests.common import DistributedTest, rank_device
from tests.offloading import GIB_OF_A_MIB

from .parity_model import on_rank
from .reference import bound, dense_mask, global_qkv, masked_attention, packed_batch

FULL: dict[str, Any] = {"kind": "full"}
PRICE: dict[str, Any] = {"kind": "price", "price": 4e-3}
LENGTHS = [130, 1, 433, 40]  # 3 + 1 + 7 + 1 blocks: as many on one rank as on four
D, SCALE = 16, 0.25


def _in_layout(x: Tensor, batch_dim: int) -> Tensor:
    """``[H, n, D]`` as ``[1, n, H, D]`` (batch_dim 0) or ``[n, 1, H, D]``."""
    return x.transpose(0, 1).unsqueeze(batch_dim).contiguous()


def _rotary(positions: int, size: int) -> tuple[Tensor, Tensor]:
    """cos and sin as Megatron-DeepSpeed makes them: ``[positions, 1, 1, size]``."""
    frequencies = 100.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    angles = torch.cat([angles, angles], -1)[:, None, None]
    return angles.cos().to(rank_device()), angles.sin().to(rank_device())


def _turned(x: Tensor, rotary: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    """Rotary embedding of ``[H, n, D]`` by complex numbers."""
    cos, sin = (table[positions.clamp(max=table.shape[0] - 1), 0, 0] for table in rotary)  # padding goes on past the table
    half = cos.shape[1] // 2
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos[:, :half], sin[:, :half])
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


def _stream_positions(lengths: list[int], tokens: int) -> Tensor:
    """Places within documents that start on blocks of 64, in a stream of ``tokens``."""
    places = torch.cat([torch.arange(-(-length // 64) * 64) for length in lengths])
    return torch.cat([places, torch.arange(tokens - places.numel())])


def _check(
    attention: type[nn.Module],
    batch_dim: int,
    heads: int,
    kv_heads: int,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    lengths: list[int] = LENGTHS,
    gather_idx: int = 0,
    **config: Any,
) -> None:
    """A call of either class, its gradients and metrics against a masked softmax over the whole stream on one process."""
    config = {"segment_tokens": 128, "local_blocks": 1, **config}
    ring, sequence, _ = bound(lengths, **config)
    ring.meter.active = True
    layer = attention(RingLocalAttention(ring, 3, softmax_scale=SCALE), ring.axes.ulysses_group, gather_idx=gather_idx)
    q, k, v = global_qkv(sequence, heads, kv_heads, D)
    do = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1)).to(q.device)

    def shard(x: Tensor) -> Tensor:
        return _in_layout(sequence.layout.shard(x, sequence.rank, 1), batch_dim)

    mine = [shard(x).requires_grad_() for x in (q, k, v)]
    o = layer(*mine, batch_dim, **({} if rotary is None else {"rotary_pos_emb": rotary}), sparse_ring=sequence)
    got = [o, *torch.autograd.grad(o, mine, shard(do))]

    _, _, alone = bound(lengths, **{**config, "degree": 1, "ulysses_degree": 1})
    whole = [x.requires_grad_() for x in (q, k, v)]
    positions = _stream_positions(lengths, q.shape[1])
    q_turned, k_turned = (x if rotary is None else _turned(x, rotary, positions) for x in (q, k))
    index = select_index(q_turned.detach(), k_turned.detach(), alone, scale=SCALE)
    visible = dense_mask(index, heads, q.shape[1])
    expected = masked_attention(q_turned, k_turned, v, visible, SCALE)
    for actual, x in zip(got, [expected, *torch.autograd.grad(expected, whole, do)], strict=True):
        torch.testing.assert_close(actual, shard(x), rtol=1e-9, atol=1e-10)
    density = visible.sum((1, 2)) / dense_mask(FullIndex(alone.segments, heads), heads, q.shape[1]).sum((1, 2))
    assert (density == 1).all() if config["selector"] == FULL else (density < 0.9).all()
    (report,) = ring.meter.pop()["per_layer"]
    assert report["layer"] == 3 and report["head_density"] == pytest.approx(density.tolist())


class TestEitherClassEqualsOneProcess(DistributedTest):
    world_size = [2, 4]

    @pytest.mark.parametrize("attention", [DeepSpeedAttention, DistributedAttention], ids=["theirs", "ours"])
    def test_outputs_and_gradients_in_both_layouts(self, attention: type[nn.Module]) -> None:
        deepspeed.init_distributed()
        for batch_dim, selector in ((0, PRICE), (1, PRICE), (1, FULL)):
            _check(attention, batch_dim, 4, 2, ulysses_degree=2, selector=selector)
        if dist.get_world_size() == 4:
            _check(attention, 1, 4, 4, ulysses_degree=4, selector=PRICE, layout="zigzag")

    def test_unequal_shares_of_the_heads_in_deepspeeds_class(self) -> None:
        deepspeed.init_distributed()
        groups.mpu = SimpleNamespace(get_sequence_parallel_rank=lambda: dist.get_rank() % 2)  # where DeepSpeed looks
        for batch_dim in (0, 1):
            _check(DeepSpeedAttention, batch_dim, 6, 3, ulysses_degree=2, selector=PRICE, gather_idx=1 - batch_dim)

    def test_fewer_kv_heads_than_ranks_and_rotary_embedding_of_documents_in_ours(self) -> None:
        world = dist.get_world_size()
        for batch_dim, ulysses, size in ((0, world, D), (1, world, 10), (1, 1, D)):
            _check(DistributedAttention, batch_dim, 4, 1, rotary=_rotary(433, size), ulysses_degree=ulysses, selector=PRICE)

    @pytest.mark.slow(world_size=[4])
    def test_deepspeeds_rotary_embedding_where_shards_are_contiguous(self) -> None:
        deepspeed.init_distributed()
        for attention in (DeepSpeedAttention, DistributedAttention):
            _check(
                attention, 0, 4, 4, lengths=[768], rotary=_rotary(768, D), ulysses_degree=dist.get_world_size(), selector=PRICE
            )


class _Model(nn.Module):
    """An embedding and a layer of attention, seq-first as in Megatron-DeepSpeed; ``core`` takes ``[n, 1, H, D]`` and a table."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = [(97, 64), (64, 4 * D + 2 * 2 * D), (4 * D, 97)]
        weights = [torch.randn(shape, generator=generator, dtype=torch.float64) / 4 for shape in shapes]
        self.embedding, self.qkv, self.out = (nn.Parameter(x.to(rank_device())) for x in weights)
        self.core = core

    def forward(self, input_ids: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = self.embedding[input_ids].transpose(0, 1)
        return checkpoint(self._layer, x, rotary, use_reentrant=False, context_fn=checkpoint_context_fn).transpose(0, 1)

    def _layer(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        heads = (x @ self.qkv).unflatten(-1, (-1, D))
        q, k, v = heads.split([4, 2, 2], dim=2)
        return self.core(q, k, v, rotary).flatten(2) @ self.out


def _example() -> str:
    """The class of the how-to page, which wraps ours."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "megatron-style-model.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]


class TestTheExampleOfTheHowTo(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("selector", [FULL, PRICE])
    def test_a_model_of_it_trains_with_the_gradients_of_one_process(self, selector: dict[str, Any]) -> None:
        rotary, results = _rotary(300, D), []
        ids = torch.randint(0, 97, (2, 300), generator=torch.Generator().manual_seed(2))  # two rows: two documents
        for degrees in ({"ulysses_degree": 2}, {}, {"degree": 1}):
            ring = SparseRing(SparseRingConfig(selector=selector, segment_tokens=128, **degrees))
            names: dict[str, Any] = {}
            exec(_example(), names)
            core = _masked_core(ring, rotary) if degrees == {"degree": 1} else copy.deepcopy(names["Attention"](ring, layer=0))
            model, batch = _Model(core), on_rank(ring.sequence_batch({"input_ids": ids, "labels": ids}))
            ring.sequence = batch["sparse_ring"]
            logits = model(batch["input_ids"], rotary)
            loss = cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), ignore_index=IGNORE, reduction="sum")
            loss.backward()
            totals = [loss.detach(), *(p.grad for p in model.parameters())]
            if degrees != {"degree": 1}:
                for x in totals:
                    dist.all_reduce(x)
            results.append(totals)
        *ours, reference = results
        for totals in ours:
            torch.testing.assert_close(totals, reference, rtol=1e-9, atol=1e-9)


def _masked_core(ring: SparseRing, rotary: tuple[Tensor, Tensor]) -> Any:
    """The whole stream by a masked softmax, with the index that a ring of one rank chooses."""

    def core(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Tensor:
        q, k, v = (x[:, 0].transpose(0, 1) for x in (q, k, v))
        tokens = q.shape[1]
        positions = _stream_positions([300, 300], tokens)
        q, k = (_turned(x, rotary, positions) for x in (q, k))
        assert ring.sequence is not None
        index = select_index(q.detach(), k.detach(), ring.bind(ring.sequence), scale=D**-0.5)
        return _in_layout(masked_attention(q, k, v, dense_mask(index, 4, tokens), D**-0.5), 1)

    return core


class _TwoLayers(nn.Module):
    """Embedding, two checkpointed layers of attention by ``core(layer)``, projection; batch-first, in float32."""

    def __init__(self, core: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(97, 64), nn.Linear(64, 97, bias=False)
        self.qkv = nn.ModuleList(nn.Linear(64, 8 * D, bias=False) for _ in range(2))
        self.o = nn.ModuleList(nn.Linear(4 * D, 64, bias=False) for _ in range(2))
        self.core = nn.ModuleList(core(layer) for layer in range(2))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 8)
        self.to(rank_device())

    def forward(self, input_ids: Tensor, sequence: Any) -> Tensor:
        x = self.embedding(input_ids)
        for layer in range(2):
            x = checkpoint(self._layer, layer, x, sequence, use_reentrant=False, context_fn=checkpoint_context_fn)
        return self.out(x)

    def _layer(self, layer: int, x: Tensor, sequence: Any) -> Tensor:
        q, k, v = self.qkv[layer](x).unflatten(-1, (-1, D)).split([4, 2, 2], 2)
        return x + self.o[layer](self.core[layer](q, k, v, 0, sparse_ring=sequence).flatten(2))


class TestWithinZero3(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("attention", [DeepSpeedAttention, DistributedAttention], ids=["theirs", "ours"])
    @pytest.mark.slow(attention=[DeepSpeedAttention])
    def test_two_groups_with_offload_have_the_gradients_of_one_process(self, attention: type[nn.Module]) -> None:
        deepspeed.init_distributed()
        ids = torch.randint(0, 97, (2, 300), generator=torch.Generator().manual_seed(2))

        def summed_loss(model: Any, batch: dict[str, Any]) -> Tensor:
            logits = model(batch["input_ids"], batch["sparse_ring"])
            return cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), ignore_index=IGNORE, reduction="sum")

        def made(core: type[nn.Module], **section: Any) -> tuple[SparseRing, _TwoLayers, dict[str, Any]]:
            ring = SparseRing(SparseRingConfig(selector=PRICE, segment_tokens=128, local_blocks=1, **section))
            model = _TwoLayers(lambda layer: core(RingLocalAttention(ring, layer), ring.axes.ulysses_group))
            return ring, model, on_rank(ring.sequence_batch({"input_ids": ids, "labels": ids}))

        _, model, batch = made(DistributedAttention, degree=1)
        (summed_loss(model, batch) / 598).backward()
        expected = [p.grad for p in model.parameters()]
        for pages in ({}, {"kv_page_tokens": 128}):
            ring, model, batch = made(attention, ulysses_degree=2, offload={"host_gib": 4 * GIB_OF_A_MIB, **pages})
            zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
            config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
            engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            engine.backward(summed_loss(engine, batch) / float(ring.count_targets([batch])) * dist.get_world_size())
            for p, gradient in zip(engine.module.parameters(), expected, strict=True):
                assert gradient is not None
                torch.testing.assert_close(safe_get_full_grad(p), gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
            assert ring.spill is not None and ring.spill.opened.numbers().to_device > 0


class TestRefusedOnSeveralRanks(DistributedTest):
    world_size = 4

    def test_groups_of_other_ranks(self) -> None:
        deepspeed.init_distributed()
        ring, sequence, _ = bound(LENGTHS, ulysses_degree=2)
        local = RingLocalAttention(ring, 0)
        for allowed in (None, dist.group.WORLD, ring.axes.ulysses_group):
            DistributedAttention(local, allowed)
        other = [dist.new_group([place, place + 2]) for place in (0, 1)][dist.get_rank() % 2]
        with pytest.raises(SparseRingError, match=r"has the ranks \[\d, \d\].*sequence is on \[0, 1, 2, 3\], its Ulysses"):
            DistributedAttention(local, other)
        tensors = [torch.zeros(sequence.layout.local_tokens, 1, 4, D) for _ in range(3)]
        with pytest.raises(SparseRingError, match=r"\[384, 1, heads.*tokens of 2 ranks.*ring.axes.ulysses_group"):
            DeepSpeedAttention(local, dist.group.WORLD)(*tensors, 1, sparse_ring=sequence)


def _single(lengths: list[int] = LENGTHS, **config: Any) -> tuple[SparseRing, DistributedAttention, list[Tensor]]:
    """A ring of one rank, our class on it, and queries, keys and values of a batch that is set on the ring."""
    ring = SparseRing(SparseRingConfig(**config))
    ring.sequence = ring.sequence_batch(packed_batch(lengths))["sparse_ring"]
    tensors = [x.transpose(0, 1)[:, None] for x in global_qkv(ring.sequence, 4, 2, D)]
    return ring, DistributedAttention(RingLocalAttention(ring, 0), None), tensors


def test_calls_that_would_lose_something_are_refused() -> None:
    ring, attention, (q, k, v) = _single()
    refused: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        (r"batch_dim_idx is a Tensor.*A mask is not taken", (q, k, v, torch.ones(1)), {}),
        (r"batch_dim_idx", (q, k, v, 2), {}),
        (r"one stream of documents here.*SparseRing.sequence_batch", (q, k, v, 0), {}),
        (r"got a Tensor: it is causal.*attention_mask", (q, k, v, 1, None, torch.ones(1)), {}),
        (r"got dropout_p", (q, k, v, 1), {"dropout_p": 0.1}),
        (r"sparse_ring is a dict", (q, k, v, 1), {"sparse_ring": {}}),
        (r"do not fit this sequence", (q[:-64], k[:-64], v[:-64], 1), {}),
        (r"at least 433 positions", (q, k, v, 1, _rotary(432, D)), {}),
        (r"even r up to the head size", (q, k, v, 1, _rotary(433, 2 * D)), {}),
        (r"must be \(cos, sin\)", (q, k, v, 1, _rotary(433, D)[0]), {}),
    ]
    for message, args, kwargs in refused:
        with pytest.raises(SparseRingError, match=message):
            attention(*args, **kwargs)
    local = RingLocalAttention(ring, 0)
    with pytest.raises(SparseRingError, match="attention_mask"):
        local(q, k, v, torch.ones(1))
    with pytest.raises(SparseRingError, match="rows become documents"):
        local(*(x.expand(-1, 2, -1, -1) for x in (q, k, v)))
    ring.sequence = None
    with pytest.raises(SparseRingError, match="set ring.sequence"):
        attention(q, k, v, 1)


def test_constructor_arguments_that_would_be_ignored_are_refused() -> None:
    ring, _, (q, k, v) = _single()
    local = RingLocalAttention(ring, 0)
    refused: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        (r"local_attention is a Identity.*RingLocalAttention", (nn.Identity(), None), {}),
        (r"scatter_idx = 1", (local, None), {"scatter_idx": 1}),
        (r"leave sp_stream out", (local, None, 2, 0, object()), {}),
    ]
    for message, args, kwargs in refused:
        with pytest.raises(SparseRingError, match=message):
            DistributedAttention(*args, **kwargs)
    with pytest.raises(SparseRingError, match="num_kv_heads = 4"):
        DistributedAttention(local, None, num_kv_heads=4)(q, k, v, 1)


def test_a_replay_on_another_sequence_than_the_first_pass_is_refused() -> None:
    ring, attention, (q, k, v) = _single([300])
    first = ring.sequence

    def layer(q: Tensor) -> Tensor:
        return attention(q, k, v, 1)

    for other, message in (([250, 40], "another sequence"), ([300], None)):
        ring.sequence = first
        out = checkpoint(layer, q.requires_grad_(), use_reentrant=False, context_fn=checkpoint_context_fn)
        ring.sequence = ring.sequence_batch(packed_batch(other))["sparse_ring"]
        if message is None:
            out.sum().backward()
        else:
            with pytest.raises(SparseRingError, match=message):
                out.sum().backward()


def test_rotary_positions_are_those_of_the_sequence_at_hand() -> None:
    ring = SparseRing(SparseRingConfig())
    for lengths in ([130], [64, 66], [130]):
        sequence = ring.sequence_batch(packed_batch(lengths))["sparse_ring"]
        for _ in range(2):
            places = ring.positions(sequence, torch.device("cpu"))
            assert torch.equal(places, _stream_positions(lengths, sequence.layout.local_tokens))
