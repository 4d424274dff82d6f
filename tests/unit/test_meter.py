"""What the meter measures of the ring: times of hops and waits, bytes by level, the host's part."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_sparse_ring import stopwatch
from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.comm import Axes
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.estimate import estimate
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.integrations.transformers import attach
from ds_sparse_ring.job import Job, ModelShape, Schedule
from ds_sparse_ring.meter import SENT
from ds_sparse_ring.plan_check import check_plans
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.stopwatch import Stopwatch
from tests.common import DistributedTest, rank_device

from .parity_model import Row, make_batch, on_rank, section, tiny_model
from .reference import bound, global_qkv


def _measured(context: Any, sequence: Any, *, slow_rank: int | None = None, delay_s: float = 0.0) -> None:
    """Attention of one layer, forward and backward, float64; kernels of one rank take longer."""
    q, k, v = (sequence.layout.shard(x, sequence.rank, 1)[None].requires_grad_() for x in global_qkv(sequence, 2, 1, 16))
    kernel = context.kernel

    class Slow:
        name = kernel.name

        def __getattr__(self, name: str) -> Any:
            if name in ("forward", "backward") and context.rank == slow_rank:
                time.sleep(delay_s)
            return getattr(kernel, name)

    object.__setattr__(context, "kernel", Slow())
    sparse_ring_attention(q, k, v, context, layer=0, scale=0.25).sum().backward()


class TestMeter(DistributedTest):
    world_size = 3

    def test_a_slow_rank_shows_in_times_and_not_in_pairs(self) -> None:
        ring, sequence, context = bound([64 * 30], selector={"kind": "full"})
        _measured(context, sequence)  # loads kernels
        ring.meter.active = True
        _measured(context, sequence, slow_rank=1, delay_s=0.4)  # far more than hops take on a machine with other work
        report = ring.meter.pop()
        assert report["pair_imbalance"] < 1.1
        assert 1.5 < report["time_imbalance"] <= 3 and 1.5 < report["hop_imbalance"] <= 3
        assert report["compute_s"] >= 3 * 2 * 0.4 / 3, "three hops, two passes, a third of the ranks"
        assert report["ring_wait_s"] > 0.4, "the others wait for the slow one"
        assert report["exposed_s"] == pytest.approx(report["ring_wait_s"] + report["columns_s"] + report["heads_s"])
        assert 0.1 < report["exposed"] < 1
        assert report["host_us_per_hop"] > 0
        for what in ("compute_s", "wait_s"):
            assert [len(report["per_hop"][name][what]) for name in ("forward", "backward")] == [3, 3]
        total = sum(sum(of_pass["compute_s"]) for of_pass in report["per_hop"].values())
        assert total == pytest.approx(report["compute_s"])

    @pytest.mark.world_size([3, 4])
    def test_bytes_are_those_of_the_plan_by_level(self) -> None:
        inner = {3: None, 4: 2}[dist.get_world_size()]
        ring, sequence, context = bound([700], selector={"kind": "full"}, inner_degree=inner)
        ring.meter.active = True
        _measured(context, sequence)
        report, plan = ring.meter.pop(), check_plans(sequence.layout, inner)
        shard_bytes = 2 * sequence.layout.local_tokens * 16 * 8  # keys and values of one head; gradients are float64 as they are
        assert report["sent_inner_bytes"] == (plan.forward.inner + plan.backward.inner) * shard_bytes
        assert report["sent_outer_bytes"] == (plan.forward.outer + plan.backward.outer) * shard_bytes

    def test_nothing_is_measured_while_the_meter_is_off(self) -> None:
        ring, sequence, context = bound([300])
        _measured(context, sequence)
        assert ring.meter.own_s == 0 and ring.meter.pop() == {}


class TestAStepSendsWhatIsPlanned(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize(("ulysses", "keep"), [(2, "output"), (2, "index"), (4, "output")])
    def test_by_the_ring_for_heads_and_for_columns(self, ulysses: int, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """In bfloat16, which is planned for. A Ulysses group of 4 shares two KV heads."""
        sent: dict[str, list[int]] = {"column_gather": [], "column_shares": []}
        for name, of_calls in sent.items():
            original = getattr(Axes, name)

            def noting(self, x, place, _original=original, _of_calls=of_calls):
                arrival = _original(self, x, place)
                _of_calls.append(arrival.sent_bytes)
                return arrival

            monkeypatch.setattr(Axes, name, noting)
        values: dict[str, Any] = {"ulysses_degree": ulysses, "layer_chunk_tokens": 37, "checkpoint": keep}
        ring = SparseRing(SparseRingConfig(**section("price", heads_per_pattern=1, **values)))
        ring.meter.active = True
        model: Any = tiny_model().to(rank_device(), torch.bfloat16)
        attach(model, ring)
        batch = on_rank(ring.sequence_batch(make_batch([Row((512,))], seed=1)))
        model(**batch, num_items_in_batch=100).loss.backward()
        report = ring.meter.pop()
        shape = ModelShape.of(model.config.to_dict(), "the test")
        job = Job(shape, load_hardware("cpu"), ring.config, 512, 4, report["density"], report["column_density"])
        planned = estimate(job, Schedule(ulysses)).sent_bytes
        for name in ("sent_inner_bytes", "sent_outer_bytes", "sent_heads_bytes"):
            assert report[name] == pytest.approx(planned[name]), name
        assert (report["sent_inner_bytes"] > 0) == (ulysses == 2) and report["sent_outer_bytes"] == 0
        total = [float(sum(map(sum, sent.values())))]
        assert report["sent_columns_bytes"] == ring.axes.world_totals(total)[0] / 4
        layers = shape.num_hidden_layers if ulysses == 2 else 0
        assert [len(of_calls) for of_calls in sent.values()] == [2 * layers, layers], (
            "gathered once more in or for the backward pass"
        )
        assert (planned["sent_columns_bytes"] > 0) == (layers > 0)


def test_ring_figures_of_one_rank_are_those_of_no_ring() -> None:
    ring, sequence, context = bound([300])
    ring.meter.active = True
    _measured(context, sequence)
    report = ring.meter.pop()
    assert (report["time_imbalance"], report["hop_imbalance"], report["ring_wait_s"]) == (1.0, 1.0, 0.0)
    assert all(report[name] == 0 for name in SENT)
    assert 0 < report["compute_s"] < report["attention_s"]


def test_the_hosts_time_for_a_hop_leaves_out_what_taking_times_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events stand in for those of a device, each slow to record; the device takes 2 ms from one to the next."""
    recorded: list[Any] = []
    slept, clock = [0.0], time.perf_counter

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            slept[0] += 100.0
            recorded.append(self)

        def synchronize(self) -> None:
            assert popping, "nothing waits for the device before the line is written"

        def elapsed_time(self, end: Event) -> float:
            return 2.0 * (recorded.index(end) - recorded.index(self))

    popping = False
    ring, sequence, context = bound([300], selector={"kind": "full"})
    ring.meter.active = True
    _measured(context, sequence)  # what is made once is made
    ring.meter.pop()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + slept[0])
    _measured(context, sequence)
    popping = True
    report = ring.meter.pop()
    assert report["compute_s"] == pytest.approx(2 * 2e-3), "one hop in each pass, from one event to the next"
    assert report["attention_s"] >= report["compute_s"] + 2 * 2e-3, "events around those of the hops"
    assert 0 < report["host_us_per_hop"] < 100e6, "two events are recorded in each turn of the loop"
    assert ring.meter.own_s >= len(recorded) * 100


def test_a_stopwatch_stays_small_and_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "_PENDING", 10)
    watch: Stopwatch[str] = Stopwatch()
    for i in range(25):
        with watch.timed("even" if i % 2 == 0 else "odd"):
            time.sleep(1e-3)
    assert len(watch._pending) == 10
    seconds = watch.pop()
    assert set(seconds) == {"even", "odd"}
    assert 25e-3 <= sum(seconds.values()) < 2.5 and seconds["even"] >= 13e-3
    assert watch.pop() == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times of a device need one")
def test_a_stopwatch_times_the_device_and_not_the_launch() -> None:
    watch: Stopwatch[str] = Stopwatch()
    x = torch.randn(4096, 4096, device="cuda")
    begin_s = time.perf_counter()
    with watch.timed("products"):
        for _ in range(50):
            x = (x @ x).clamp(-1, 1)
    launched_s = time.perf_counter() - begin_s
    assert watch.pop()["products"] > launched_s / 10 and watch.own_s > 0
