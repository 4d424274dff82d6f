"""Hooks of the test suite: tests on several ranks, and a time budget per folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.budget import TimeBudget
from tests.worker import DEEPSPEED_TESTS

# Before torch and DeepSpeed are imported, here and in the ranks: one thread per rank, nothing from the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TIME_BUDGET_S = {"tests/unit": 2600.0}
"""Seconds that the tests of a folder may take together, two at once in ``make test``. If they take longer, make them smaller."""

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported, here and in the ranks

_WORLD = "_world_size"
_KEEPER: pytest.StashKey[Any] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deepspeed-tests",
        metavar="DIR",
        help="run DistributedTest classes under DeepSpeed's own harness; the tests/ folder of its repository",
    )

    parser.addoption(
        "--cases",
        choices=["quick", "slow", "all"],
        help="which cases run by their mark slow: without it the quick ones, and all on a GPU and of tests that are named",
    )
    parser.addoption("--nccl", action="store_true", help="only tests on several ranks, each on a GPU of its own (make test-gpus)")
    parser.addoption("--sanitize", action="store_true", help="run compiled kernels under sanitizers (make test-sanitize)")


def pytest_configure(config: pytest.Config) -> None:
    import hypothesis

    config.addinivalue_line("markers", "world_size(n): ranks of a method of a DistributedTest; a list is one case each")
    config.addinivalue_line(
        "markers",
        "slow(**values): a test, or its cases with one of these values of each, that only `make test-slow` runs on CPUs",
    )
    config.pluginmanager.register(TimeBudget(TIME_BUDGET_S if _cases(config) == "quick" else {}), "time-budget")
    # The same examples in each run: a test that fails only now and then is of no use in CI.
    hypothesis.settings.register_profile("project", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("project")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if config.getoption("--sanitize"):
        from deepspeed.ops.op_builder.builder import OpBuilder

        from ds_sparse_ring.op_builder import CPUAttentionBuilder

        # kernels ask for the op by its usual name, and get this one
        OpBuilder._loaded_ops[CPUAttentionBuilder().name] = CPUAttentionBuilder(sanitize=True).load()
    if folder := config.getoption("--deepspeed-tests"):
        # Through the environment, because the ranks that DeepSpeed's harness starts import tests.common afresh.
        os.environ[DEEPSPEED_TESTS] = str(Path(folder).resolve())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not _is_ours(metafunc.cls):
        return
    from tests.common import world_sizes

    sizes = world_sizes(metafunc.cls, metafunc.function)
    metafunc.fixturenames.append(_WORLD)
    metafunc.parametrize(_WORLD, sizes, ids=[f"world{size}" for size in sizes])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Tests of one world size in a row: their ranks are started once, and only those of one size are alive at a time.
    items.sort(key=_world_size)
    if (cases := _cases(config)) != "all":
        _keep(config, items, lambda item: _is_slow(item) == (cases == "slow"))
    nccl, gpus = config.getoption("--nccl"), torch.cuda.device_count()
    if nccl:
        _keep(config, items, lambda item: _world_size(item) >= 2)
    for item in items:
        if (nccl or getattr(getattr(item, "cls", None), "gpus_only", False)) and _world_size(item) > gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {_world_size(item)} GPUs, here are {gpus}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly or not any(_world_size(item) for item in session.items):
        return
    from tests.common import PoolKeeper
    from tests.pool import warm_up

    session.config.stash[_KEEPER] = PoolKeeper(Path(session.config.rootpath))
    warm_up()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not getattr(pyfuncitem.cls, "is_dist_test", False):
        return None
    if not _is_ours(pyfuncitem.cls):
        pyfuncitem.cls()(pyfuncitem._request)  # how DeepSpeed's classes are run
        return True
    from tests.worker import TestCall

    call = TestCall(
        module=pyfuncitem.module.__name__,
        class_name=pyfuncitem.cls.__qualname__,
        method=pyfuncitem.function.__name__,
        arguments={name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames},
    )
    pyfuncitem.config.stash[_KEEPER].run(pyfuncitem.cls, _world_size(pyfuncitem), call)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    keeper = session.config.stash.get(_KEEPER, None)
    if keeper is not None:
        keeper.close()


def _keep(config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]) -> None:
    """Leave in ``items`` those that are wanted, and report the others as deselected."""
    left_out: list[pytest.Item] = []
    kept: list[pytest.Item] = []
    for item in items:
        (kept if wanted(item) else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _cases(config: pytest.Config) -> str:
    """Of "quick", "slow" and "all" what this session runs."""
    if chosen := config.getoption("--cases"):
        return str(chosen)
    named = any("::" in argument for argument in config.args)
    return "all" if named or torch.cuda.is_available() else "quick"


def _is_slow(item: pytest.Item) -> bool:
    """Whether a mark ``slow`` fits a case: without values it fits all; ``world_size`` is that of a `DistributedTest`."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    values = {name.lstrip("_"): value for name, value in parameters.items()}
    marks = list(item.iter_markers("slow"))
    if unknown := {name for mark in marks for name in mark.kwargs} - values.keys():
        raise pytest.UsageError(f"{item.nodeid}: the mark slow names {sorted(unknown)}, which are no parameters of it")
    return any(all(values[name] in chosen for name, chosen in mark.kwargs.items()) for mark in marks)


def _is_ours(test_class: type | None) -> bool:
    """Whether a test class runs on our ranks; False for one derived from DeepSpeed's class (see --deepspeed-tests)."""
    return getattr(test_class, "is_dist_test", False) and not hasattr(test_class, "_launch_with_file_store")


def _world_size(item: pytest.Item) -> int:
    """Ranks that a test needs; 0 for one that runs in the parent."""
    callspec = getattr(item, "callspec", None)
    return int(callspec.params.get(_WORLD, 0)) if callspec is not None else 0
