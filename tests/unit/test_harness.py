"""The harness itself: a failing, hanging or dying rank fails its test and only its test."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.common import DistributedTest, rank_device, world_sizes
from tests.pool import Pool, RanksFailed, RanksSkipped
from tests.worker import DEEPSPEED_TESTS, TestCall

ROOT = Path(__file__).parents[2]
_seen_steps: list[int] = []

ours_only = pytest.mark.skipif(DEEPSPEED_TESTS in os.environ, reason="about our harness, not that of DeepSpeed")


class Cases:
    """Methods for ranks, called by the tests below through a pool of their own."""

    def passes(self) -> None:
        dist.barrier()

    def fails_on_rank_1(self) -> None:
        print(f"rank {dist.get_rank()} speaks")
        value = dist.get_rank() + 1
        if dist.get_rank() == 1:
            assert value == 3
        dist.barrier()

    def hangs(self, folder: Path) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / f"rank{dist.get_rank()}").write_text(f"{os.getpid()} {child.pid}")
        self.waits_for_nothing()

    def waits_for_nothing(self) -> None:
        time.sleep(600)

    def dies_on_rank_0(self, code: int) -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
        dist.barrier()

    def skips(self) -> None:
        pytest.skip("no reason")

    def skips_on_rank_1(self) -> None:
        if dist.get_rank() == 1:
            pytest.skip("rank 1 has no reason")


@pytest.fixture
def pool() -> Iterator[Pool]:
    new = Pool(2, "cpu", ROOT)
    yield new
    new.close()


def call(method: str, **arguments: Any) -> TestCall:
    return TestCall(__name__, "Cases", method, arguments)


def test_a_failing_rank_fails_the_test_with_its_traceback_values_and_output(pool: Pool) -> None:
    pool.run(call("passes"), timeout_s=60)
    with pytest.raises(RanksFailed) as failure:
        pool.run(call("fails_on_rank_1"), timeout_s=60)
    story = str(failure.value)
    assert "rank 1 of 2 failed" in story and "fails_on_rank_1" in story
    assert "assert 2 == 3" in story
    assert "rank 1 speaks" in story
    assert "rank 0 of 2: still running when another rank had failed" in story
    assert not pool.alive


def test_a_hang_is_killed_with_all_ranks_and_their_children_and_shows_where(pool: Pool, tmp_path: Path) -> None:
    pool.run(call("passes"), timeout_s=60)  # imports what the test needs
    started_s = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        pool.run(call("hangs", folder=tmp_path), timeout_s=4)
    assert time.monotonic() - started_s < 30
    story = str(failure.value)
    for rank in range(2):
        assert f"rank {rank} of 2: no answer within 4 s" in story
    assert "waits_for_nothing" in story
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / f"rank{rank}").read_text().split()]
    assert len(pids) == 4
    deadline_s = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not [pid for pid in pids if _runs(pid)]


@pytest.mark.parametrize(("code", "reason"), [(3, "exit code 3"), (-9, "killed by SIGKILL")])
def test_the_death_of_a_rank_is_reported_at_once(pool: Pool, code: int, reason: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(RanksFailed, match=f"rank 0 of 2 died: {reason}"):
        pool.run(call("dies_on_rank_0", code=code), timeout_s=100)
    assert time.monotonic() - started_s < 50


def test_a_skip_needs_all_ranks(pool: Pool) -> None:
    with pytest.raises(RanksSkipped, match="no reason"):
        pool.run(call("skips"), timeout_s=60)
    pool.run(call("passes"), timeout_s=60)
    with pytest.raises(RanksFailed, match="1 of 2 ranks skipped"):
        pool.run(call("skips_on_rank_1"), timeout_s=60)


def test_a_folder_over_its_time_budget_fails_the_session(tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    suite.mkdir()
    (tmp_path / "conftest.py").write_text(
        textwrap.dedent(f"""
            import sys
            sys.path.insert(0, {str(ROOT)!r})
            from tests.budget import TimeBudget
            def pytest_configure(config):
                config.pluginmanager.register(TimeBudget({{"suite": 0.2}}))
        """)
    )
    for seconds, status in ((0.0, 0), (0.3, 1)):
        (suite / "test_one.py").write_text(f"import time\ndef test_one():\n    time.sleep({seconds})\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "suite"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == status, result.stdout + result.stderr
        assert "1 passed" in result.stdout
        assert ("OVER BUDGET" in result.stdout) == bool(status)


def test_a_mark_overrides_the_world_size_of_the_class() -> None:
    @pytest.mark.world_size([1, 4])
    def marked() -> None: ...

    def plain() -> None: ...

    assert world_sizes(DistributedTest, marked) == [1, 4]
    assert world_sizes(DistributedTest, plain) == [2]


class TestRanks(DistributedTest):
    world_size = [1, 2]

    @pytest.mark.parametrize("value", [1, 2.5])
    def test_ranks_have_a_group_an_environment_and_the_arguments(self, value: float, tmp_path: Path) -> None:
        size = dist.get_world_size()
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(dist.get_rank()), str(size))
        assert os.environ["OMP_NUM_THREADS"] == "1" and torch.get_num_threads() == 1
        total = torch.tensor([value], device=rank_device())
        dist.all_reduce(total)
        assert total.item() == value * size
        shared = tmp_path / f"world{size}"
        shared.mkdir(exist_ok=True)
        (shared / str(dist.get_rank())).touch()
        dist.barrier()
        assert len(list(shared.iterdir())) == size

    @pytest.mark.world_size(3)
    def test_a_method_may_have_its_own_world_size(self) -> None:
        assert dist.get_world_size() == 3

    @ours_only
    @pytest.mark.parametrize("step", [0, 1])
    def test_processes_are_reused_and_their_global_state_is_put_back(self, step: int) -> None:
        from accelerate.state import AcceleratorState
        from deepspeed.utils import groups
        from transformers.integrations import deepspeed as hf_deepspeed

        assert _seen_steps == list(range(step))
        _seen_steps.append(step)

        assert "HARNESS_TEST" not in os.environ
        assert torch.get_default_dtype() == torch.float32
        assert torch.initial_seed() == 1234
        assert len(dist.distributed_c10d._world.pg_map) == 1
        assert groups.mpu is None and not AcceleratorState._shared_state
        assert hf_deepspeed._hf_deepspeed_config_weak_ref is None

        os.environ["HARNESS_TEST"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(5)
        dist.new_group()
        groups.mpu = object()
        AcceleratorState._shared_state["x"] = 1
        hf_deepspeed._hf_deepspeed_config_weak_ref = object()  # type: ignore[assignment]


@ours_only
class TestFreshRanks(DistributedTest):
    fresh = True

    @pytest.mark.parametrize("step", [0, 1])
    def test_each_test_has_new_processes(self, step: int) -> None:
        assert _seen_steps == []
        _seen_steps.append(step)
        dist.barrier()


class TestRanksWithoutGroup(DistributedTest):
    init_distributed = False

    def test_a_test_may_form_the_group_itself(self) -> None:
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        assert dist.get_world_size() == 2


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([], False),
        ([pytest.mark.slow], True),
        ([pytest.mark.slow(world_size=[2, 4])], True),
        ([pytest.mark.slow(world_size=[4], kind=["a"])], False),
        ([pytest.mark.slow(world_size=[4], kind=["a"]), pytest.mark.slow(kind=["a"])], True),
    ],
)
def test_slow_cases_are_those_whose_values_all_fit_a_mark(marks: list[pytest.MarkDecorator], expected: bool) -> None:
    from tests.conftest import _is_slow

    item: Any = SimpleNamespace(
        nodeid="test_x",
        callspec=SimpleNamespace(params={"_world_size": 2, "kind": "a"}),
        iter_markers=lambda name: [mark.mark for mark in marks],
    )
    assert _is_slow(item) == expected
    marks.append(pytest.mark.slow(other=[1]))
    with pytest.raises(pytest.UsageError, match="test_x: the mark slow names .'other'."):
        _is_slow(item)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie only waits for whoever adopted it
