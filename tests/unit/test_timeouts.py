"""A rank that stops or dies does not hang the others: they end in time, and say which rank, hop and peer it was."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from ds_sparse_ring import comm
from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.comm import Arrival, Axes, Exchange, Place
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.kernels import contract
from ds_sparse_ring.watch import StreamPlace, TransferWatch, Watched
from tests.common import DistributedTest
from tests.pool import Pool, RanksFailed
from tests.worker import TestCall

from .reference import bound, global_qkv
from .test_column_parts import part_bytes
from .trainer_runs import arguments, ds_config, make_rows, make_trainer

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 3.0


class Stopped(Exception):
    """What the rank that stops does in place of its next step."""


def _attend(**config: Any) -> torch.Tensor:
    _, sequence, context = bound([700], timeout_s=TIMEOUT_S, selector={"kind": "full"}, **config)
    q, k, v = (sequence.layout.shard(x, sequence.rank, 1)[None].requires_grad_() for x in global_qkv(sequence, 2, 1, 16))
    return sparse_ring_attention(q, k, v, context, layer=7, scale=0.25)


@contextmanager
def _before(place: Place, rank: int, action: Callable[[], None]) -> Iterator[None]:
    """Have a rank do something in place of posting the transfer of a place."""
    exchange_all = Axes.exchange_all

    def watched(self: Axes, x: Any, transfers: Any, tag: int, at: Place) -> Any:
        if at == place and self.rank == rank:
            action()
        return exchange_all(self, x, transfers, tag, at)

    with pytest.MonkeyPatch.context() as patch:  # the fixture's patches would outlive the test on the ranks
        patch.setattr(Axes, "exchange_all", watched)
        yield


def _stop() -> None:
    raise Stopped


class _Work:
    """A transfer with NCCL, as far as the watch looks at it."""

    def __init__(self) -> None:
        self.over = False

    def is_completed(self) -> bool:
        return self.over


class _Watch(TransferWatch):
    """What it is told of."""

    def __init__(self) -> None:
        self.entries: list[Watched] = []
        self.messages: list[str] = []
        self.places = 0

    def add(self, work: Any, describe: Callable[[str], str]) -> Watched:
        self.entries.append(Watched(0.0, work, describe))
        self.messages.append(describe("did not end"))
        return self.entries[-1]

    def waited_for(self, entry: Watched, place: Any) -> None:
        assert isinstance(place, _Work) and entry in self.entries
        self.places += 1


class TestARankThatStops(DistributedTest):
    world_size = 3

    @pytest.mark.parametrize("backward", [False, True])
    def test_the_others_end_in_time_and_name_rank_hop_and_peer(self, backward: bool) -> None:
        begin_s, rank = time.monotonic(), dist.get_rank()
        with pytest.raises(Stopped if rank == 2 else SparseRingError) as failure, _before(Place(7, backward, 1), 2, _stop):
            _attend().sum().backward()
        if rank == 2:
            return
        assert time.monotonic() - begin_s < 3 * TIMEOUT_S
        name, text = "backward" if backward else "forward", str(failure.value)
        peers = f"to rank {(rank + 1) % 3} and from rank {(rank - 1) % 3}"
        assert text.startswith(f"rank {rank}: layer 7, {name} pass, hop 1: keys and values {peers} did not get through (")
        assert f"{TIMEOUT_S * 1e3:.0f}ms" in text and "sparse_ring.timeout_s" in text

    def test_an_operation_of_the_whole_ring_names_it(self) -> None:
        ring, _, _ = bound([700], timeout_s=TIMEOUT_S)
        if dist.get_rank() != 2:
            with pytest.raises(SparseRingError, match=r"rank [01]: a sum over the ring did not get through .*ranks .*2: one of"):
                ring.axes.ring_sum(torch.ones(3))

    @pytest.mark.parametrize("ulysses", [1, 3])
    def test_with_nccl_columns_sums_and_heads_are_watched_and_named(self, ulysses: int) -> None:
        ring, _, _ = bound([700], ulysses_degree=ulysses)
        watch, x = _Watch(), torch.ones(3, 2)
        axes = dataclasses.replace(ring.axes, watch=watch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm, "StreamPlace", _Work)  # there is no stream here
            if ulysses == 3:
                arrivals: tuple[Arrival[Any], ...] = (axes.swap_shares([x.chunk(3)], Place(7, False, chunk=2)),)
                arrivals[0].wait()
            else:
                arrivals = axes.column_gather(x, Place(7, False)), axes.column_shares(torch.ones(3, 2), Place(7, True))
                axes.ring_sum(x)
                assert [arrival.wait().shape for arrival in arrivals] == [(9, 2), (1, 2)]
            for arrival in arrivals:
                arrival.wait()
        assert watch.places == len(arrivals), "a place of the stream for each, once"
        forward, backward = "layer 7, forward pass", "layer 7, backward pass"
        whats = [f"{forward}, chunk 2: exchanging heads within a Ulysses group"]
        if ulysses == 1:
            columns = [f"{forward}: gathering columns from the ring", f"{backward}: a sum of columns over the ring"]
            whats = [*columns, "a sum over the ring"]
            over = [entry.work.is_completed() for entry in watch.entries]
            assert over == [True, True, False], "of columns, the operation itself until it is waited for"
        rank = dist.get_rank()
        others = ", ".join(str(other) for other in range(3) if other != rank)
        expected = [f"rank {rank}: {what} did not end. Look at the logs of ranks {others}: one of them" for what in whats]
        assert [message[: message.index(" may")] for message in watch.messages] == expected

    @pytest.mark.parametrize("config", [{"ulysses_degree": 3}, {"selector": {"kind": "fixed", "columns": 40, "slashes": 2}}])
    def test_messages_of_heads_and_columns_name_layer_and_pass(self, config: dict[str, Any]) -> None:
        watch = _Watch()
        _, sequence, context = bound([700], segment_tokens=256, **({"selector": {"kind": "full"}} | config))
        context = dataclasses.replace(context, axes=dataclasses.replace(context.axes, watch=watch))
        q, k, v = (sequence.layout.shard(x, sequence.rank, 1)[None].requires_grad_() for x in global_qkv(sequence, 3, 3, 16))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm, "StreamPlace", _Work)
            patch.setattr(contract, "PART_BYTES", part_bytes(60, torch.float64))  # columns in parts: gathered in both passes
            sparse_ring_attention(q, k, v, context, layer=7, scale=0.25).sum().backward()
        found = Counter(message.partition(": ")[2].partition(" did not end")[0] for message in watch.messages)
        forward, backward = "layer 7, forward pass", "layer 7, backward pass"
        if "ulysses_degree" in config:
            heads = "exchanging heads within a Ulysses group"
            assert found == {f"{forward}: {heads}": 2, f"{backward}: {heads}": 2}
            return
        gathers, returns = "gathering columns from the ring", "a sum of columns over the ring"
        assert {what: found[what] for what in found if "columns" in what} == {
            f"{forward}: {gathers}": found[f"{backward}: {returns}"],
            f"{backward}: {gathers}": found[f"{backward}: {returns}"],
            f"{backward}: {returns}": found[f"{backward}: {returns}"],
        }

    @pytest.mark.world_size(4)
    def test_ranks_of_an_inner_ring_are_named_by_their_numbers_in_the_world(self) -> None:
        rank = dist.get_rank()
        with pytest.raises(Stopped if rank == 3 else SparseRingError) as failure, _before(Place(7, False, 0), 3, _stop):
            _attend(inner_degree=2)
        expected = {  # the hop in which a transfer was posted; rank 0 waits for rank 1, which waits for the one that stopped
            0: "hop 2: keys and values to rank 1 and from rank 1",
            1: "hop 0: keys and values for the next round to rank 3 and from rank 3",
            2: "hop 0: keys and values to rank 3 and from rank 3",
        }
        assert rank == 3 or expected[rank] in str(failure.value)


def test_an_operation_that_failed_fails_again_and_goes_on_with_what_is_left() -> None:
    def work(name: str) -> Any:
        def wait() -> None:
            waited.append(name)
            if name == "broken":
                raise RuntimeError("timed out")

        return SimpleNamespace(wait=wait)

    waited: list[str] = []
    works = [work("broken"), work("sound")]
    axes = Axes(1, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
        arrival = Arrival(torch.ones(1), [*works], None, partial(axes._naming, "a sum", None))
        exchange = Exchange(torch.ones(1), [*works], torch.ones(1), "a transfer {}".format)
        for operation, message in ((arrival, "rank 0: a sum did not get through"), (exchange, "a transfer did not get through")):
            for _ in range(2):
                with pytest.raises(SparseRingError, match=rf"{message} \(timed out\)"):
                    operation.wait()
    assert waited == ["sound", "broken", "broken"] * 2


class Cases:
    """Called through a pool of its own."""

    def dies_in_hop_1(self) -> None:
        with _before(Place(7, True, 1), 1, lambda: os._exit(3)):
            _attend().sum().backward()

    def is_killed_while_training(self) -> None:
        with TemporaryDirectory() as folder, _before(Place(0, True, 1), 1, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            trainer, _ = make_trainer(arguments(folder, ds_config(3, timeout_s=TIMEOUT_S)), make_rows([200] * 4))
            trainer.train()


def test_a_training_step_ends_in_time_when_a_rank_is_killed() -> None:
    pool, begin = Pool(2, "cpu", ROOT), time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        pool.run(TestCall(__name__, "Cases", "is_killed_while_training", {}), timeout_s=100)
    story = str(failure.value)
    assert re.search("rank 1 of 2 died: .*SIGKILL", story)
    assert "SparseRingError: rank 0: layer 0, backward pass, hop" in story
    assert "still running when another rank had failed" not in story, "the other one ends, too"
    assert time.monotonic() - begin < 100


def test_a_rank_that_dies_is_named_by_the_one_that_waits_for_it() -> None:
    pool = Pool(2, "cpu", ROOT)
    with pytest.raises(RanksFailed) as failure:
        pool.run(TestCall(__name__, "Cases", "dies_in_hop_1", {}), timeout_s=60)
    story = str(failure.value)
    assert "rank 1 of 2 died: exit code 3" in story
    assert "SparseRingError: rank 0: layer 7, backward pass, hop" in story
    assert re.search("to rank 1 and from rank 1 (did not get through|could not begin)", story)
    assert "one of them may have died" in story
    assert "still running when another rank had failed" not in story, "the other one ends, too"


def test_the_watch_names_the_oldest_late_transfer_once_and_ends_with_its_ring(capfd: pytest.CaptureFixture[str]) -> None:
    watch, works = TransferWatch(timeout_s=0.5), [_Work() for _ in range(4)]
    works[0].over = True
    for number, work in enumerate(works):
        watch.add(work, f"transfer {number} {{}}".format)
    assert watch.late() is None, "none is late yet"
    time.sleep(0.8)
    assert capfd.readouterr().err == "transfer 1 did not end in 0 s; NCCL ends the process after 0.5 s\n"
    watch.add(works[0], str)
    time.sleep(0.1)
    assert watch.late() is None and not watch._under_way
    name, before = "sparse-ring-watch", threading.active_count()
    del watch
    gc.collect()
    time.sleep(0.2)
    assert threading.active_count() < before and name not in [thread.name for thread in threading.enumerate()]


def test_the_watch_lets_go_of_what_the_stream_waits_for_and_names_what_is_late_before_it() -> None:
    watch, columns, hop, place = TransferWatch(timeout_s=1000.0), _Work(), _Work(), _Work()
    entry = watch.add(columns, "columns {}".format)
    late_hop = watch.add(hop, "hop {}".format)
    released = weakref.ref(columns)
    del columns
    watch.waited_for(entry, cast(StreamPlace, place))  # as the host does, which never waits for the hop
    assert released() is None
    entry.begin_s -= 2000
    late_hop.begin_s -= 1000
    assert (watch.late() or "").startswith("hop did not end in 1000 s"), "the stream stands still for the hop"
    entry = watch.add(_Work(), "columns {}".format)
    entry.begin_s -= 950
    watch.waited_for(entry, cast(StreamPlace, place))
    assert (watch.late() or "").startswith("columns did not end in 950 s"), "as old as the transfer"
    watch.waited_for(watch.add(_Work(), str), cast(StreamPlace, place))
    place.over = True
    assert watch.late() is None and not watch._under_way
