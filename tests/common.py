"""`DistributedTest`: test classes whose methods run on several ranks, in the shape of DeepSpeed's class of that name.

    class TestRing(DistributedTest):
        world_size = 2                              # or [2, 3]: one case each; a method can have its own by
                                                    # @pytest.mark.world_size(4)
        @pytest.mark.parametrize("causal", [True, False])
        def test_forward(self, causal, tmp_path):   # runs on every rank; parameters and fixtures must be picklable
            assert dist.get_world_size() == 2

Fixtures are made once, in the parent; ``setup_method`` runs there too. The ranks of a world size are started once and
serve all its tests (see tests/pool.py). A failing rank fails the test with that rank's traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.pool import Pool, RanksFailed, RanksSkipped, best_device
from tests.worker import DEEPSPEED_TESTS, TestCall


class DistributedTest:
    """Base of test classes whose methods run on all ranks."""

    is_dist_test: ClassVar[bool] = True

    world_size: int | list[int] = 2
    """Ranks; with a list, each test runs once per entry."""

    timeout_s: float = 120
    """Seconds until a test counts as hung and its ranks are killed."""

    fresh: bool = False
    """Whether each test gets processes of its own, for tests that leave process-global state behind."""

    gpus_only: bool = False
    """Whether each rank needs a GPU of its own: without as many as ranks the test is skipped, which says how many it needs."""

    init_distributed: bool = True
    """Whether the process group exists when the test starts; without it the processes are always fresh."""


class PoolKeeper:
    """Holds the pool of the last world size: tests are ordered by world size, so only one is alive at a time."""

    def __init__(self, rootdir: Path) -> None:
        self._rootdir = rootdir
        self._pool: Pool | None = None

    def close(self) -> None:
        """Kill the ranks that wait for more tests."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @contextmanager
    def pool(self, world_size: int, fresh: bool, init_distributed: bool) -> Iterator[Pool]:
        """A pool of that size, new or reused."""
        if fresh or not init_distributed:
            new = Pool(world_size, best_device(world_size), self._rootdir, init_distributed)
            try:
                yield new
            finally:
                new.close()
            return
        if self._pool is None or not self._pool.alive or self._pool.world_size != world_size:
            self.close()
            self._pool = Pool(world_size, best_device(world_size), self._rootdir)
        yield self._pool

    def run(self, test_class: type[DistributedTest], world_size: int, call: TestCall) -> None:
        """Run one test; failures and skips become those of pytest."""
        skipped = failed = None
        try:
            with self.pool(world_size, test_class.fresh, test_class.init_distributed) as pool:
                pool.run(call, test_class.timeout_s)
        except RanksSkipped as reason:
            skipped = str(reason)
        except RanksFailed as story:
            failed = str(story)
        # Outside of the handlers, or pytest would print the story twice, as cause and as failure.
        if skipped is not None:
            pytest.skip(skipped)
        if failed is not None:
            pytest.fail(failed, pytrace=False)


if DEEPSPEED_TESTS in os.environ:
    sys.path.insert(0, os.environ[DEEPSPEED_TESTS])
    from unit.common import DistributedTest  # type: ignore[no-redef]  # noqa: F811


def world_sizes(test_class: Any, function: Any) -> list[int]:
    """The world sizes that a test method asks for."""
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "world_size"]
    sizes = marks[0].args[0] if marks else test_class.world_size
    return list(sizes) if isinstance(sizes, list | tuple) else [sizes]


def rank_device() -> Any:
    """The torch device of the calling rank: its own GPU, or the CPU."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
