"""The store of tensors outside the device: bits, order, lifetimes, budgets and messages, on every tier."""

from __future__ import annotations

import gc
import random
import re
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_sparse_ring import pinned
from ds_sparse_ring.config import OffloadConfig
from ds_sparse_ring.copies import Tier
from ds_sparse_ring.disk import UNIT_BYTES, DiskFile
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.pinned import HostBuffer
from ds_sparse_ring.store import Store
from tests.offloading import MemoryFile, Packed, offloaded, train
from tests.unit.deferred_streams import DeferredStreams

CPU = torch.device("cpu")
KIB = 1024
TIERS: list[Tier] = ["device", "host", "disk"]


@pytest.fixture
def store() -> Iterator[Store]:
    store = make_store()
    yield store
    store.close()


def make_store(host_bytes: int = 256 * KIB, **changes: Any) -> Store:
    options: dict[str, Any] = {
        "disk": MemoryFile(16 * UNIT_BYTES),
        "staging_bytes": 2 * UNIT_BYTES,
        "segment_bytes": 8 * KIB,
    } | changes
    return Store(CPU, host_bytes, **options)


TENSORS = [
    torch.randn(3, 5, 7),
    torch.randn(64, 32).to(torch.bfloat16).t(),
    torch.randn(4, 6, 8).permute(2, 0, 1)[:, 1:3],  # has gaps
    torch.randn(8, 1).expand(8, 3),
    torch.randn(1000)[3:900:2],
    torch.tensor([float("nan"), float("-inf"), -0.0, 1e-40]),
    torch.arange(7),
    torch.tensor(True),
    torch.randn(0, 4),
    torch.randn(2500, requires_grad=True),  # longer than a segment
]


class TestContents:
    @pytest.mark.parametrize("tier", TIERS)
    def test_bits_shape_dtype_and_order_in_memory_come_back(self, store: Store, tier: Tier) -> None:
        for i, x in enumerate(TENSORS):
            store.put(i, x, tier)
        for i in (5, 0):
            store.prefetch(i)
        for i, x in enumerate(TENSORS):
            y = store.get(i)
            assert y.shape == x.shape and y.dtype == x.dtype and not y.requires_grad
            assert torch.equal(y.contiguous().view(-1).view(torch.uint8), x.detach().contiguous().view(-1).view(torch.uint8))
            expected = x.stride() if tier == "device" else torch.empty_like(x).stride()
            assert y.stride() == expected
            assert torch.equal(store.get(i).isnan(), y.isnan())
            store.drop(i)
        assert store.numbers().bytes_now["disk"] == store.numbers().bytes_now["device"] == 0

    @pytest.mark.parametrize("tier", ["host", "disk"])
    def test_what_is_kept_does_not_change_with_the_tensor_that_was_got(self, store: Store, tier: Tier) -> None:
        store.put("x", torch.ones(5), tier)
        store.get("x").zero_()
        assert torch.equal(store.get("x"), torch.ones(5))


class TestOrder:
    @given(st.integers(0, 10**9))
    @settings(max_examples=60)
    def test_contents_are_right_however_late_the_device_is(self, seed: int) -> None:
        """Puts, prefetches, gets and drops in a small slab; streams work late and in any order that is left to them."""
        wrong = run_late(seed, ["host"], steps=150)
        assert not wrong, wrong

    @given(st.integers(0, 10**9))
    @settings(max_examples=40)
    def test_contents_are_right_with_a_disk_behind(self, seed: int) -> None:
        wrong = run_late(seed, ["host", "disk"], steps=60)
        assert not wrong, wrong

    def test_memory_of_few_tensors_is_held_while_the_host_is_ahead(self) -> None:
        streams = DeferredStreams(0)
        store = make_store(streams=streams, in_flight=2)
        for i in range(10):  # the device has done nothing yet
            store.put(i, streams.empty(torch.Size([4096]), (1,), torch.uint8))
        assert store.numbers().bytes_now["device"] == 2 * 4096
        streams.advance(10**6)
        store.prefetch(0)
        assert store.numbers().bytes_now["device"] == 4096, "the buffer of the prefetch alone"
        store.drop(0)
        assert store.numbers().bytes_peak["device"] <= 4 * 4096
        store.close()

    def test_what_fits_does_not_depend_on_how_far_the_device_is(self) -> None:
        streams = DeferredStreams(0)
        store = make_store(16 * KIB, streams=streams)
        for i in range(50):
            store.put(i, streams.empty(torch.Size([16 * KIB]), (1,), torch.uint8))
            store.prefetch(i)
            store.drop(i)
        assert store.numbers().bytes_peak["host"] == 16 * KIB
        store.close()


def run_late(seed: int, tiers: list[Tier], steps: int) -> list[str]:
    """A random history on late streams; what readers on the compute stream found wrong."""
    choose = random.Random(seed)
    streams = DeferredStreams(seed)
    store = make_store(48 * KIB, streams=streams, in_flight=choose.choice([1, 2, 4]), disk=MemoryFile(6 * UNIT_BYTES))
    kept: dict[int, int] = {}
    wrong: list[str] = []

    def fill(memory: np.ndarray, value: int) -> None:
        memory[:] = value

    def look(memory: np.ndarray, key: int, value: int) -> None:
        if not (memory == value).all():
            wrong.append(f"key {key}: {np.unique(memory)[:4]} instead of {value}")

    for key in range(steps):
        streams.advance(choose.choice([0, 0, 1, 5, 40]))
        streams.here = choose.choice(streams.compute)
        action = choose.choice(["put", "put", "prefetch", "get", "get", "drop"])
        some = choose.choice(list(kept)) if kept else None
        if action == "put":
            nbytes, tier = choose.choice([4 * KIB, 12 * KIB]), choose.choice(tiers)
            if store.room(tier) < nbytes:
                continue
            x = streams.empty(torch.Size([nbytes]), (1,), torch.uint8)
            kept[key] = key % 150
            streams.queue(streams.here, partial(fill, streams.memory(x), kept[key]))
            store.put(key, x, tier)
            del x
        elif some is not None and action == "prefetch":
            store.prefetch(some)
        elif some is not None and action == "get":
            y = store.get(some)
            streams.queue(streams.here, partial(look, streams.memory(y), some, kept[some]))
            del y  # its memory is free for what is queued later
        elif some is not None:
            store.drop(some)
            del kept[some]
    store.close()
    streams.advance(10**6)
    return wrong


class TestLifetime:
    @pytest.mark.parametrize("tier", TIERS)
    def test_training_is_bit_equal_with_and_without_over_steps_that_reuse_the_slab(self, tier: Tier) -> None:
        store = make_store(96 * KIB)
        for a, b in zip(train(store, tier, CPU), train(None, tier, CPU), strict=True):
            assert torch.equal(a, b)
        store.close()

    def test_a_step_that_fails_in_the_middle_leaves_nothing_and_the_next_one_runs(self, store: Store) -> None:
        def step(fail: bool) -> Tensor:
            w = torch.ones(64, 64, requires_grad=True)
            with offloaded(store, "host"):
                y = torch.tanh(torch.ones(4, 64) @ w)
                if fail:
                    raise RuntimeError("out of luck")
                return torch.autograd.grad(y.sum(), w)[0]

        with pytest.raises(RuntimeError, match="out of luck"):
            step(True)
        gc.collect()
        assert store.room("host") == 256 * KIB
        assert torch.equal(step(False), step(False))

    def test_an_owner_takes_its_tensors_along_but_not_later_ones_of_the_same_key(self, store: Store) -> None:
        first, second = Packed(1), Packed(2)
        store.put("x", torch.ones(3), owner=first)
        store.drop("x")
        store.put("x", torch.zeros(3), owner=second)
        del first
        assert torch.equal(store.get("x"), torch.zeros(3))
        del second
        assert "x" not in store

    def test_an_owner_may_die_while_the_store_is_at_work_in_another_thread(self, store: Store) -> None:
        owner: list[Packed] = [Packed(0)]
        store.put("x", torch.ones(3), owner=owner[0])
        with store._lock:
            thread = threading.Thread(target=owner.clear)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
        assert "x" not in store

    def test_clear_drops_all_and_keys_are_free_again(self, store: Store) -> None:
        for tier in TIERS:
            store.put(tier, torch.ones(4), tier)
            store.prefetch(tier)
        store.clear()
        for tier in TIERS:
            assert tier not in store
            store.put(tier, torch.zeros(4), tier)
            assert torch.equal(store.get(tier), torch.zeros(4))


class TestErrors:
    def test_a_full_tier_names_bytes_asked_free_largest_piece_and_budget(self, store: Store) -> None:
        for i in range(4):
            store.put(i, torch.ones(64 * KIB, dtype=torch.uint8))
        store.drop(0)
        store.drop(2)
        with pytest.raises(
            SparseRingError, match=r"66000 bytes .* 262144 bytes .* 131072 bytes .* largest piece 65536 bytes .*host_gib"
        ):
            store.put("x", torch.ones(66000, dtype=torch.uint8))
        assert "x" not in store and store.room("host") == 64 * KIB
        with pytest.raises(SparseRingError, match=r"staging memory: raise sparse_ring.offload.staging_gib"):
            store.put("x", torch.ones(66000, dtype=torch.uint8), "disk")
        for i in range(16):
            store.put(("disk", i), torch.ones(UNIT_BYTES, dtype=torch.uint8), "disk")
        with pytest.raises(SparseRingError, match=r"disk tier.*disk_gib"):
            store.put("x", torch.ones(1), "disk")

    def test_unknown_and_doubled_keys_foreign_devices_and_a_missing_disk(self, store: Store) -> None:
        store.put("x", torch.ones(1))
        with pytest.raises(SparseRingError, match="'x' was put twice"):
            store.put("x", torch.ones(1))
        for call in (store.get, store.prefetch, store.drop):
            with pytest.raises(SparseRingError, match="there is no 'y'"):
                call("y")
        with pytest.raises(SparseRingError, match="is on meta, but the store keeps tensors of cpu"):
            store.put("y", torch.ones(1, device="meta"))
        small = make_store(disk=None, staging_bytes=0)
        assert small.room("disk") == 0
        with pytest.raises(SparseRingError, match="disk_path"):
            small.put("y", torch.ones(1), "disk")
        small.close()

    @pytest.mark.parametrize("direction", ["read", "write"])
    def test_a_disk_that_fails_is_an_error_and_no_hang_and_clear_forgets_it(self, direction: str) -> None:
        file = MemoryFile(8 * UNIT_BYTES)
        store = make_store(disk=file)
        file.failing = direction
        with pytest.raises(SparseRingError, match="the disk is gone"):
            for i in range(6):
                store.put(i, torch.ones(UNIT_BYTES, dtype=torch.uint8), "disk")
                store.get(i)
        file.failing = ""
        store.clear()
        store.put(0, torch.ones(9), "disk")
        assert torch.equal(store.get(0), torch.ones(9))
        store.close()

    def test_a_folder_that_is_not_there_and_a_disk_too_small_are_named(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        monkeypatch.setattr("ds_sparse_ring.disk._async_io", lambda: None)
        with pytest.raises(SparseRingError, match=r"disk_path: no file can be made in /no/such/folder"):
            DiskFile("/no/such/folder", 1 << 20)
        with pytest.raises(SparseRingError, match=r"disk_gib: .* GiB cannot be reserved .* GiB were free"):
            DiskFile(tmp_path, 1 << 55)
        assert not list(tmp_path.iterdir())

    def test_without_libaio_the_way_to_it_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
        with pytest.raises(SparseRingError, match="install libaio-dev"):
            DiskFile(tmp_path, 1 << 20)


class TestMemory:
    def test_memory_is_pinned_once_by_segments_as_it_is_first_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[int, int]] = []
        codes = iter([0, 0, 2])

        def register(address: int, size: int, flags: int) -> SimpleNamespace:
            calls.append((address, size))
            return SimpleNamespace(value=next(codes))

        released: list[int] = []
        cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=released.append)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        memory = HostBuffer(10 * KIB, pin=True, segment_bytes=4 * KIB)
        base = memory.bytes.data_ptr()
        assert not calls and base % 4096 == 0
        memory.ready(100, 200)
        memory.ready(0, 4 * KIB)
        assert calls == [(base, 4 * KIB)]
        memory.ready(9 * KIB, 10 * KIB)
        assert calls[1:] == [(base + 8 * KIB, 2 * KIB)] and memory.pinned_bytes == 6 * KIB
        with pytest.raises(SparseRingError, match=r"cannot pin another .* \(error 2\)"):
            memory.ready(0, 10 * KIB)
        memory.close()
        assert sorted(released) == [base, base + 8 * KIB] and memory.pinned_bytes == 0

    def test_copies_are_cut_where_segments_meet(self) -> None:
        memory = HostBuffer(10 * KIB, pin=False, segment_bytes=4 * KIB)
        assert memory.pieces(KIB, 9 * KIB) == [(KIB, 4 * KIB), (4 * KIB, 8 * KIB), (8 * KIB, 9 * KIB)]
        assert memory.pieces(4 * KIB, 8 * KIB) == [(4 * KIB, 8 * KIB)]

    def test_a_machine_with_too_little_memory_is_warned_about_with_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pinned, "_meminfo", lambda: {"MemAvailable": 3 << 30, "MemTotal": 4 << 30})
        with pytest.warns(UserWarning, match=r"4 times 1\.0 GiB \(one for each rank\), but 3\.0 of this machine's 4\.0 GiB"):
            make_store(1 << 30, ranks_on_host=4).close()

    def test_numbers_are_those_of_the_calls(self, store: Store) -> None:
        for i in range(3):
            store.put(i, torch.ones(5 * KIB, dtype=torch.uint8), "host" if i else "disk")
        store.get(0), store.get(1), store.get(1)
        numbers = store.numbers()
        assert (numbers.to_host, numbers.to_device) == (3, 3)
        assert (numbers.to_host_bytes, numbers.to_device_bytes) == (15 * KIB, 15 * KIB)
        assert (numbers.written_bytes, numbers.read_bytes) == (UNIT_BYTES, UNIT_BYTES)
        store.drop(1)
        store.drop(0)
        numbers = store.numbers()
        assert numbers.bytes_now["disk"] == numbers.bytes_now["device"] == 0
        assert numbers.bytes_peak["disk"] == UNIT_BYTES and 16 * KIB <= numbers.bytes_peak["host"] <= 16 * KIB + 2 * UNIT_BYTES

    def test_waits_for_copies_can_be_timed(self) -> None:
        names: list[str] = []

        class Timed:
            def __init__(self, name: str) -> None:
                names.append(name)

            def __enter__(self) -> None: ...
            def __exit__(self, *exception: object) -> None: ...

        store = make_store(timed=Timed)
        store.put(0, torch.ones(1))
        store.get(0)
        assert names == ["copy_wait"]
        store.close()

    def test_a_store_is_made_from_the_configuration(self) -> None:
        store = Store.from_config(OffloadConfig(host_gib=2**-10), CPU)
        assert store.room("host") == 2**20 and store.room("disk") == 0
        store.close()
        with pytest.raises(SparseRingError, match=re.escape("disk_path: ")):
            Store.from_config(OffloadConfig(host_gib=1, disk_path="/no/such/folder", disk_gib=1), CPU)
