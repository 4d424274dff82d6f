"""What checkpointed layers keep may leave the device: the same bits, less memory, nothing left behind."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ds_sparse_ring.config import OffloadConfig, SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.deepspeed import initialize
from ds_sparse_ring.integrations.transformers import enable_gradient_checkpointing
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.spill import Spill
from ds_sparse_ring.store import Store
from tests.common import DistributedTest, rank_device

from .parity_model import Row, make_batch, on_rank, section, tiny_model

ROWS = [Row((290,)), Row((130, 157, 3))]
GIB_OF_A_MIB = 1 / 1024


def _train(
    zero: int, offload: dict[str, Any] | None, keep: str, steps: int = 5, chunk_tokens: int | None = None
) -> tuple[list[torch.Tensor], SparseRing]:
    """Losses and gradient norms of some steps, and the weights at last."""
    ring = SparseRing(SparseRingConfig(**section("price", offload=offload, checkpoint=keep, layer_chunk_tokens=chunk_tokens)))
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
        batch = on_rank(ring.sequence_batch(make_batch([ROWS[step % 2]], seed=step)))
        loss = engine(**batch, num_items_in_batch=ring.count_targets([batch])).loss
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm()
        seen += [loss.detach().cpu(), torch.tensor(0.0 if norm is None else float(norm))]
        del loss
    return seen, ring


class TestTraining(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(("zero", "keep", "chunk_tokens"), [(3, "output", None), (2, "index", None), (3, "output", 50)])
    def test_gives_the_same_bits_with_and_without_offload(self, zero: int, keep: str, chunk_tokens: int | None) -> None:
        expected, _ = _train(zero, None, keep, chunk_tokens=chunk_tokens)
        got, ring = _train(zero, {"host_gib": GIB_OF_A_MIB}, keep, chunk_tokens=chunk_tokens)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert ring.spill is not None and ring.spill.store is not None
        numbers = ring.spill.store.numbers()
        layers, steps = 2, 5
        # a layer's input, and what attention keeps: o and lse
        assert numbers.to_device == steps * layers * (1 if keep == "index" else 3)
        gc.collect()
        assert ring.spill.store.room("host") == 2**20, "every step took what it kept along"

    def test_a_budget_that_is_too_small_says_what_it_takes(self) -> None:
        with pytest.raises(SparseRingError, match=r"needs \d+ bytes .*host_gib"):
            _train(2, {"host_gib": 8 * GIB_OF_A_MIB / 1024}, "output", steps=1)


@pytest.fixture
def spill() -> Spill:
    return Spill(OffloadConfig(host_gib=GIB_OF_A_MIB), lambda name: nullcontext())


def test_what_was_kept_before_comes_back_before_it_is_asked_for(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [spill.keep([torch.full((64, 64), float(i)), torch.full((2048,), -float(i))]) for i in range(5)]
    fetched: list[Any] = []
    prefetch = Store.prefetch

    def watched(store: Store, key: Any) -> None:
        fetched.append(key)
        prefetch(store, key)

    monkeypatch.setattr(Store, "prefetch", watched)
    for i in reversed(range(5)):
        a, b = kept[i].take()
        assert (a == i).all() and (b == -i).all()
        assert all(key in fetched for other in kept[max(0, i - 2) : i] for key in other.keys)
    assert not set(fetched) & set(kept[4].keys), "nothing is fetched that was taken"


def test_what_nobody_takes_goes_with_its_owner(spill: Spill) -> None:
    kept = [spill.keep([torch.zeros(64, 64)]) for _ in range(3)]
    assert spill.store is not None
    room = spill.store.room("host")
    del kept[1]
    gc.collect()
    assert [float(x.sum()) for x in kept.pop().take()] == [0.0]
    del kept
    gc.collect()
    assert spill.store.room("host") == 2**20 > room


def test_small_tensors_that_autograd_saves_stay(spill: Spill) -> None:
    small, large = (torch.randn(n, device=rank_device(), requires_grad=True) for n in (8, 4096))
    with spill.saved_tensors():
        out = small.exp().sum() + large.exp().sum()
    out.backward()
    assert spill.store is not None and spill.store.numbers().to_device == 1
    assert large.grad is not None and torch.equal(large.grad, large.detach().exp())
