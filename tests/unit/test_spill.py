"""What checkpointed layers keep may leave the device: the same bits, less memory, nothing left behind."""

from __future__ import annotations

import gc
import io
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

from ds_sparse_ring import pinned
from ds_sparse_ring.config import OffloadConfig, SparseRingConfig
from ds_sparse_ring.disk import UNIT_BYTES
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.deepspeed import initialize
from ds_sparse_ring.integrations.memory import check_memory
from ds_sparse_ring.integrations.transformers import attach, enable_gradient_checkpointing
from ds_sparse_ring.ladder import KeptBytes, Ladder, make_ladder
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.spill import Graph, Spill, Spilled
from ds_sparse_ring.store import Store
from tests.common import DistributedTest, rank_device
from tests.offloading import GIB_OF_A_MIB, MemoryFile

from .parity_model import Row, make_batch, on_rank, section, tiny_model

ROWS = [Row((290,)), Row((130, 157, 3))]
GIB_OF_A_KIB = GIB_OF_A_MIB / 1024


def _train(
    zero: int,
    offload: dict[str, Any] | None,
    keep: str,
    steps: int = 5,
    chunk_tokens: int | None = None,
    rows: list[Row] = ROWS,
    selector: str = "price",
) -> tuple[list[torch.Tensor], SparseRing]:
    """Losses, gradients and their norms of some steps."""
    ring = SparseRing(SparseRingConfig(**section(selector, offload=offload, checkpoint=keep, layer_chunk_tokens=chunk_tokens)))
    model = tiny_model()
    enable_gradient_checkpointing(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = initialize(model, config, ring=ring, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for step in range(steps):
        batch = on_rank(ring.sequence_batch(make_batch([rows[step % len(rows)]], seed=step)))
        loss = engine(**batch, num_items_in_batch=ring.count_targets([batch])).loss
        engine.backward(loss)
        seen += [safe_get_full_grad(p).detach().clone() for p in engine.module.parameters()]
        engine.step()
        norm = engine.get_global_grad_norm()
        seen += [loss.detach().cpu(), torch.tensor(0.0 if norm is None else float(norm))]
        del loss
    return seen, ring


class TestTraining(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        ("zero", "keep", "chunk_tokens", "selector"),
        [(3, "output", None, "price"), (2, "index", None, "every_query"), (3, "output", 50, "every_query")],
    )
    @pytest.mark.slow(selector=["price"])
    def test_gives_the_same_bits_with_and_without_offload(
        self, zero: int, keep: str, chunk_tokens: int | None, selector: str
    ) -> None:
        expected, _ = _train(zero, None, keep, chunk_tokens=chunk_tokens, selector=selector)
        got, ring = _train(zero, {"host_gib": GIB_OF_A_MIB}, keep, chunk_tokens=chunk_tokens, selector=selector)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert ring.spill is not None and ring.spill.store is not None
        numbers = ring.spill.store.numbers()
        layers, steps = 2, 5
        # a layer's input, and what attention keeps: o and lse
        assert numbers.to_device == steps * layers * (1 if keep == "index" else 3)
        gc.collect()
        assert ring.spill.store.room("host") == 2**20, "every step took what it kept along"

    @pytest.mark.parametrize(
        ("device_kib", "host_kib", "zero", "copied", "lines"),
        [
            (0, 112, 3, 4, "layer 0: input host, attended again; layer 1: input host, output host"),
            (32, 96, 2, 3, "layer 0: input host, attended again; layer 1: input device, output host"),
            (80, 32, 3, 0, "layers 0-1: input device, attended again"),
            (160, 32, 2, 0, "layers 0-1: input device, output device"),
        ],
    )
    @pytest.mark.slow(zero=[2])
    def test_gives_the_same_bits_wherever_the_ladder_puts_it(
        self, device_kib: int, host_kib: int, zero: int, copied: int, lines: str
    ) -> None:
        """192 tokens a rank: an input takes 32 KiB, o and lse 48."""
        rows = [Row((290,))]
        expected, _ = _train(zero, None, "output", steps=3, rows=rows)
        budgets = {"device_gib": device_kib * GIB_OF_A_KIB, "host_gib": host_kib * GIB_OF_A_KIB}
        with redirect_stdout(io.StringIO()) as printed:
            got, ring = _train(zero, budgets, "output", steps=3, rows=rows)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert ring.spill is not None
        assert (ring.spill.store.numbers().to_device if ring.spill.store is not None else 0) == 3 * copied
        assert printed.getvalue().count(lines) == (ring.axes.rank == 0), printed.getvalue()

    @pytest.mark.parametrize("chunk_tokens", [None, 50])
    @pytest.mark.slow(chunk_tokens=[None])
    def test_gives_the_same_bits_from_the_disk_and_from_all_tiers(self, chunk_tokens: int | None) -> None:
        disk = {"disk_path": "/", "disk_gib": GIB_OF_A_MIB, "staging_gib": GIB_OF_A_MIB / 4}
        expected, _ = _train(3, None, "output", chunk_tokens=chunk_tokens)
        for host_kib, device_kib in ((4, 0), (40, 40)):
            budgets = {"host_gib": host_kib * GIB_OF_A_KIB, "device_gib": device_kib * GIB_OF_A_KIB, **disk}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("ds_sparse_ring.store.DiskFile", lambda _, nbytes: MemoryFile(nbytes // UNIT_BYTES * UNIT_BYTES))
                got, ring = _train(3, budgets, "output", chunk_tokens=chunk_tokens)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            assert ring.spill is not None and ring.spill.opened.numbers().read_bytes > 0

    def test_a_budget_that_is_too_small_says_what_it_takes(self) -> None:
        with pytest.raises(SparseRingError, match=r"needs \d+ bytes .*0 in host memory .*host_gib to .*disk_path"):
            _train(2, {"host_gib": 8 * GIB_OF_A_KIB}, "output", steps=1)

    def test_two_passes_before_a_backward_pass_keep_apart_and_share_the_room(self) -> None:
        """Host memory has room for what one and a half passes keep: outputs of the second one are attended to again."""
        losses = []
        for offload in (None, {"host_gib": 256 * GIB_OF_A_KIB}, {"host_gib": 120 * GIB_OF_A_KIB}):
            ring = SparseRing(SparseRingConfig(**section("price", offload=offload)))
            model = tiny_model().to(rank_device()).train()
            enable_gradient_checkpointing(model)
            with attach(model, ring):
                batches = [on_rank(ring.sequence_batch(make_batch([Row((290,))], seed=seed))) for seed in (1, 2)]
                if offload is not None and offload["host_gib"] < 200 * GIB_OF_A_KIB:
                    with pytest.raises(SparseRingError, match=r"needs \d+ bytes.* backward pass of one forward pass"):
                        [model(**batch).loss for batch in batches]
                    continue
                first, second = (model(**batch).loss for batch in batches)
                first.backward()
                second.backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            losses.append([first.detach(), second.detach(), *gradients])
        assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


class TestFirstBatch(DistributedTest):
    world_size = 2

    def test_a_folder_that_one_rank_lacks_ends_all_of_them_before_a_pass(self) -> None:
        rank = dist.get_rank()
        offload = {"host_gib": GIB_OF_A_MIB, "disk_path": "/no/such", "disk_gib": GIB_OF_A_MIB}
        ring = SparseRing(SparseRingConfig(**section("price", offload=offload)))
        model = tiny_model().train()
        enable_gradient_checkpointing(model)
        sequence = ring.sequence_batch(make_batch(ROWS[:1], seed=1))["sparse_ring"]
        told = "training does not begin: ranks 1 say why" if rank == 0 else "offload.disk_path.*/no/such"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SparseRingError, match=told):
            patch.setattr("ds_sparse_ring.disk._async_io", lambda: None)
            if rank == 0:
                patch.setattr("ds_sparse_ring.store.DiskFile", lambda *_: MemoryFile(1 << 20))
            check_memory(model, None, ring, {}, sequence)


def test_the_limit_of_a_control_group_is_known_and_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_CONTROL_GROUP", tmp_path)
    assert pinned.memory_limit() is None
    (tmp_path / "memory.max").write_text("max\n")
    assert pinned.memory_limit() is None
    (tmp_path / "memory.max").write_text("65536\n")
    assert pinned.memory_limit() == 65536
    with pytest.warns(UserWarning, match="may pin 2 times 0.0 GiB .*but 0.0 of this machine's"):
        pinned.warn_if_short(65536, 2)
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    assert pinned.memory_limit() is None


@pytest.fixture
def spill() -> Spill:
    return Spill(OffloadConfig(host_gib=GIB_OF_A_MIB), lambda name: nullcontext())


@pytest.fixture
def graph(spill: Spill) -> Graph:
    return spill.graph()


def _keep(graph: Graph, layer: int, *tensors: torch.Tensor) -> Spilled:
    kept = graph.keep_output(layer, tensors)
    assert kept is not None
    return kept


def test_what_was_kept_before_comes_back_before_it_is_asked_for(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [_keep(graph, i, torch.full((64, 64), float(i)), torch.full((2048,), -float(i))) for i in range(5)]
    fetched = _watched(monkeypatch)
    for i in reversed(range(5)):
        a, b = kept[i].take()
        assert (a == i).all() and (b == -i).all()
        assert all(key in fetched for other in kept[max(0, i - 2) : i] for key in other.keys)
    assert not set(fetched) & set(kept[4].keys), "nothing is fetched that was taken"


def test_of_two_passes_neither_fetches_for_the_other(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = spill.graph(), spill.graph()
    first, second = ([_keep(graph, i, torch.full((64, 64), float(i))) for i in range(4)] for graph in graphs)
    fetched = _watched(monkeypatch)
    first[3].take()
    assert sorted(fetched) == [key for kept in first[1:3] for key in kept.keys]
    second[3].take()
    assert sorted(fetched)[2:] == [key for kept in second[1:3] for key in kept.keys]


def test_what_will_be_taken_once_more_comes_early_again(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [_keep(graph, i, torch.full((64, 64), float(i))) for i in range(3)]
    assert (kept[1].take(last=False)[0] == 1).all()
    fetched = _watched(monkeypatch)
    kept[2].take()
    assert kept[1].keys[0] in fetched and (kept[1].take()[0] == 1).all()
    kept[0].take()
    assert fetched.count(kept[1].keys[0]) == 1, "and not a third time"


def _watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keys that are prefetched from now on."""
    fetched: list[Any] = []
    prefetch = Store.prefetch

    def watched(store: Store, key: Any) -> None:
        fetched.append(key)
        prefetch(store, key)

    monkeypatch.setattr(Store, "prefetch", watched)
    return fetched


def _ladder(spill: Spill) -> Ladder:
    return make_ladder(KeptBytes(4, 16, (16,)), 1024, spill.budgets, keep_outputs=True)


def test_a_second_pass_takes_the_next_tier_and_then_none_for_outputs() -> None:
    """Both passes want the device for layers 2 and 3, which has room for one of these passes; the host then has for two more."""
    kib = GIB_OF_A_KIB
    spill = Spill(OffloadConfig(device_gib=32 * kib, host_gib=96 * kib), lambda name: nullcontext())
    x = torch.zeros(4096)
    first, second = spill.graph(_ladder(spill)), spill.graph(_ladder(spill))
    kept = [first.keep_input(layer, x + layer) for layer in range(4)] + [_keep(first, 3, x)]
    assert [len(one.keys) for one in kept] == [1, 1, 0, 0, 1]
    again = [second.keep_input(layer, x - layer) for layer in range(3)]
    assert all(one.keys for one in again), "the device is taken"
    assert second.keep_output(3, [x]) is None and second.keep_output(0, [x]) is None
    with pytest.raises(SparseRingError, match="16384 bytes"):
        second.keep_input(3, x)
    assert [float(one.take()[0][0]) for one in kept + again] == [0, 1, 2, 3, 0, 0, -1, -2]
    del kept
    gc.collect()
    assert not second.keep_input(3, x).keys, "the device is free again"


def test_what_nobody_takes_goes_with_its_owner(spill: Spill, graph: Graph) -> None:
    kept = [_keep(graph, i, torch.zeros(64, 64)) for i in range(3)]
    assert spill.store is not None
    room = spill.store.room("host")
    del kept[1]
    gc.collect()
    assert [float(x.sum()) for x in kept.pop().take()] == [0.0]
    del kept
    gc.collect()
    assert spill.store.room("host") == 2**20 > room


def test_small_tensors_that_autograd_saves_stay(spill: Spill, graph: Graph) -> None:
    small, large = (torch.randn(n, device=rank_device(), requires_grad=True) for n in (8, 4096))
    with graph.saved_tensors():
        out = small.exp().sum() + large.exp().sum()
    out.backward()
    assert spill.store is not None and spill.store.numbers().to_device == 1
    assert large.grad is not None and torch.equal(large.grad, large.detach().exp())
