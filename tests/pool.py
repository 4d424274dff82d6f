"""The parent's side of the test harness: a pool of ranks, one process each, reused by all tests of a world size."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.worker import Outcome, RankSetup, TestCall, rank_main

START_TIMEOUT_S = 300.0
GRACE_S = 5.0
"""After the first rank has failed the others may hang in a collective; they get this long to answer themselves."""
LOG_TAIL_LINES = 40
STACK_LINES = 200

# Imported once by the server that ranks are forked from. Not with CUDA, whose driver does not survive a fork.
_PRELOADED = ["pytest", "torch", "deepspeed", "transformers"]


class RanksFailed(Exception):
    """At least one rank failed, died or did not answer in time; the text holds each rank's story."""


class RanksSkipped(Exception):
    """All ranks skipped the test."""


@dataclass
class _Rank:
    process: Any
    connection: Connection
    log_path: Path
    outcome: Outcome | None = None
    log_start: int = 0
    stacks_start: int | None = None

    def output(self) -> str:
        """The last lines that the rank printed in this test, and the stacks of its threads if it was asked for them."""
        if not self.log_path.exists():
            return ""
        log = self.log_path.read_bytes()
        printed = _lines(log[self.log_start : self.stacks_start])[-LOG_TAIL_LINES:]
        # The innermost frame comes first, so stacks are cut at the other end.
        stacks = [] if self.stacks_start is None else _lines(log[self.stacks_start :])[:STACK_LINES]
        return "\n".join(printed + stacks)


@dataclass
class Pool:
    """``world_size`` ranks on one device type. Usable until `run` raises; then, or at the end, `close` it."""

    world_size: int
    device: str
    rootdir: Path
    init_distributed: bool = True
    alive: bool = True
    _ranks: list[_Rank] = field(default_factory=list)
    _folder: Any = None

    def __post_init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks_")
        folder, port = Path(self._folder.name), _free_port()
        context = multiprocessing.get_context("forkserver")
        try:
            for rank in range(self.world_size):
                ours, theirs = multiprocessing.Pipe()
                log_path = folder / f"rank{rank}.log"
                setup = RankSetup(
                    rank=rank,
                    world_size=self.world_size,
                    device=self.device,
                    store_path=str(folder / "store"),
                    master_port=port,
                    log_path=str(log_path),
                    parent_path=tuple(sys.path),
                    rootdir=str(self.rootdir),
                    init_distributed=self.init_distributed,
                )
                # Not daemonic: tests may start processes of their own (data loaders, launchers).
                process = context.Process(target=rank_main, args=(setup, theirs), name=f"rank{rank}", daemon=False)
                process.start()
                theirs.close()
                self._ranks.append(_Rank(process, ours, log_path))
            self._collect(START_TIMEOUT_S, "to start")
        except BaseException:
            self.close()
            raise

    def run(self, call: TestCall, timeout_s: float) -> None:
        """Run a test method on all ranks.

        Raises:
            RanksFailed: if a rank failed, died or took longer than ``timeout_s``; the pool is closed then, because the
                other ranks may hang in a collective.
            RanksSkipped: if all ranks skipped.
        """
        try:
            for rank in self._ranks:
                rank.outcome = None
                rank.log_start = rank.log_path.stat().st_size
                with contextlib.suppress(BrokenPipeError):  # a rank that died between two tests: reported by _collect
                    rank.connection.send(call)
            self._collect(timeout_s, "to finish")
        except BaseException:
            self.close()
            raise
        skipped = [rank.outcome.text for rank in self._ranks if rank.outcome and rank.outcome.kind == "skipped"]
        if len(skipped) == self.world_size:
            raise RanksSkipped(skipped[0])
        if skipped:
            self.close()
            raise RanksFailed(f"{len(skipped)} of {self.world_size} ranks skipped ({skipped[0]}), the others did not")

    def close(self) -> None:
        """Kill all ranks and what they started."""
        self.alive = False
        for rank in self._ranks:
            rank.connection.close()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):  # before it has made its own group
                os.kill(rank.process.pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.process.join()
        self._folder.cleanup()

    def _collect(self, timeout_s: float, purpose: str) -> None:
        """Wait for one outcome of each rank."""
        deadline, failed = time.monotonic() + timeout_s, False
        while waiting := [rank for rank in self._ranks if rank.outcome is None]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            ready = wait([r.connection for r in waiting] + [r.process.sentinel for r in waiting], min(left_s, 1.0))
            for rank in waiting:
                if rank.connection in ready or rank.process.sentinel in ready:
                    rank.outcome = _receive(rank)
                if rank.outcome is not None and rank.outcome.kind in ("failed", "died") and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        if waiting and not failed:
            self._dump_stacks(waiting)
        if waiting or failed:
            raise RanksFailed(self._story(f"no answer within {timeout_s:g} s {purpose}", failed))

    def _dump_stacks(self, ranks: list[_Rank]) -> None:
        """Have ranks write the Python stacks of their threads to their logs, to show where they hang."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                rank.stacks_start = rank.log_path.stat().st_size
                os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _story(self, silence: str, failed: bool) -> str:
        parts = []
        for number, rank in enumerate(self._ranks):
            name = f"rank {number} of {self.world_size}"
            outcome = rank.outcome
            if outcome is None:
                parts.append(f"{name}: " + ("still running when another rank had failed" if failed else silence))
            elif outcome.kind in ("failed", "died"):
                parts.append(f"{name} {outcome.kind}: {outcome.text}")
            else:
                continue
            if output := rank.output():
                parts.append(f"--- last output of {name} ---\n{output}")
        return "\n".join(parts)


def _receive(rank: _Rank) -> Outcome:
    try:
        if rank.connection.poll():
            outcome = rank.connection.recv()
            assert isinstance(outcome, Outcome)
            return outcome
    except (EOFError, ConnectionResetError):
        pass
    rank.process.join(timeout=5)
    code = rank.process.exitcode
    if code is None:
        return Outcome("died", "it closed its connection but still runs")
    return Outcome("died", f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")


def warm_up() -> None:
    """Start the server that ranks are forked from; it imports the heavy libraries while other tests run."""
    from multiprocessing import forkserver

    if best_device(1) == "cpu":
        multiprocessing.set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()


def best_device(world_size: int) -> str:
    """ "cuda" where there is a GPU for each rank, else "cpu": tests are never skipped for lack of devices."""
    import torch

    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world_size else "cpu"


def _lines(log: bytes) -> list[str]:
    return log.decode(errors="replace").splitlines()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
