"""The store on a CUDA device: races, host synchronisation, and what it keeps alive."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch

from ds_sparse_ring.store import Store
from ds_sparse_ring.units import MIB
from tests.offloading import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LONG = 20_000_000
"""Cycles of a kernel that only waits: about 10 ms."""


def make_store(host_bytes: int = 64 * MIB, in_flight: int = 4) -> Store:
    return Store(torch.device("cuda"), host_bytes, segment_bytes=MIB, in_flight=in_flight)  # tensors cross segments


@pytest.fixture
def store() -> Iterator[Store]:
    store = make_store()
    yield store
    torch.cuda.set_sync_debug_mode("default")
    store.close()


@pytest.mark.parametrize("seed", range(8))
def test_contents_are_right_while_kernels_and_copies_run_late(seed: int) -> None:
    """The slab and the allocator's memory are used again all the time, on two streams; sleeps delay work and copies at random."""
    choose = random.Random(seed)
    store = make_store(24 * MIB, choose.choice([1, 2, 4]))
    device, copies = torch.device("cuda"), store._copies.streams
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = {stream: torch.zeros((), dtype=torch.int64, device=device) for stream in streams}
    kept: dict[int, int] = {}
    torch.cuda.synchronize()
    for key in range(600):
        if choose.random() < 0.15:
            with torch.cuda.stream(choose.choice([*streams, copies.to_host, copies.to_device])):
                torch.cuda._sleep(choose.randrange(LONG // 10))
        here = choose.choice(streams)
        action = choose.choice(["put", "put", "prefetch", "get", "get", "drop"])
        some = choose.choice(list(kept)) if kept else None
        with torch.cuda.stream(here):
            if action == "put":
                count = choose.choice([MIB // 4, 3 * MIB // 4 + 1])
                if store.room("host") < 4 * count:
                    continue
                kept[key] = key
                store.put(key, torch.full((count,), key, dtype=torch.int32, device=device))
            elif some is not None and action == "prefetch":
                store.prefetch(some)
            elif some is not None and action == "get":
                wrong[here] += (store.get(some) != kept[some]).sum()
            elif some is not None:
                store.drop(some)
                del kept[some]
    torch.cuda.synchronize()
    assert [int(count) for count in wrong.values()] == [0, 0]
    assert store.numbers().to_device > 100
    store.close()


def test_the_host_never_waits(store: Store) -> None:
    x = torch.randn(3 * MIB // 4, device="cuda")

    def layer(key: int) -> None:
        store.put(key, x + key)
        store.prefetch(key)
        store.get(key).mul_(2)
        store.drop(key)

    for key in range(40):  # memory is pinned and buffers are made
        layer(key)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda._sleep(100 * LONG)
    begin = time.perf_counter()
    for key in range(15):  # beyond about a thousand operations in a queue the driver makes the host wait
        layer(key)
    took_s, busy = time.perf_counter() - begin, not torch.cuda.current_stream().query()
    torch.cuda.set_sync_debug_mode("default")
    assert busy, f"the calls took {took_s:.3f} s and the device's sleep was over by then"


def test_memory_is_pinned_and_not_more_than_was_touched(store: Store) -> None:
    assert store.numbers().pinned_bytes == 0
    assert not store._memory.bytes[MIB : MIB + 8].is_pinned()
    store.put("x", torch.ones(5 * MIB // 8, device="cuda"))  # 2.5 MiB
    assert store.numbers().pinned_bytes == 3 * MIB
    assert store._memory.bytes[MIB : MIB + 8].is_pinned()


def test_device_memory_is_bounded_while_the_host_is_ahead() -> None:
    store = make_store(640 * MIB, in_flight=2)
    for key in range(40):  # pins
        store.put(key, torch.empty(16 * MIB, dtype=torch.uint8, device="cuda"))
    store.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda._sleep(10 * LONG)
    for key in range(40):
        store.put(key, torch.full((16 * MIB,), key, dtype=torch.uint8, device="cuda"))
    assert torch.cuda.max_memory_allocated() - before <= 4 * 16 * MIB
    assert all(bool((store.get(key) == key).all()) for key in range(40))
    store.close()


@pytest.mark.usefixtures("deterministic")
def test_training_is_bit_equal_with_and_without_over_steps_that_reuse_the_slab(store: Store) -> None:
    device = torch.device("cuda")
    for a, b in zip(train(store, "host", device, 512, 2048), train(None, "host", device, 512, 2048), strict=True):
        assert torch.equal(a, b)
