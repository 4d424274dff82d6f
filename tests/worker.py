"""One rank of the test harness: a process that runs test methods as the parent names them.

The process lives for many tests, so that torch and DeepSpeed are imported and the process group is formed once. Between
two tests everything that libraries keep in process-global state is put back.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import Any

DEEPSPEED_TESTS = "DEEPSPEED_TESTS"
"""Environment variable with the tests/ folder of DeepSpeed's repository, if its harness is to run the tests."""

GROUP_TIMEOUT_S = 600
SEED = 1234


@dataclass(frozen=True)
class RankSetup:
    """What a rank is told when it starts. ``device`` is "cpu" or "cuda"."""

    rank: int
    world_size: int
    device: str
    store_path: str
    master_port: int
    log_path: str
    parent_path: tuple[str, ...]
    rootdir: str
    init_distributed: bool


@dataclass(frozen=True)
class TestCall:
    """One test method and the values of its fixtures and parameters."""

    __test__ = False

    module: str
    class_name: str
    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a call on one rank: "ready", "passed", "skipped" or "failed", with a reason or traceback."""

    kind: str
    text: str = ""


def rank_main(setup: RankSetup, connection: Connection) -> None:
    """Serve test calls until the parent hangs up."""
    os.setsid()  # the parent kills the whole group, so that nothing a test started outlives it
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    _redirect_output(setup.log_path)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _set_environment(setup)
    try:
        _rewrite_assertions(setup)
        state = GlobalState(setup)
    except BaseException:
        connection.send(Outcome("failed", traceback.format_exc()))
        return
    connection.send(Outcome("ready"))
    with contextlib.suppress(EOFError):
        while True:
            call = connection.recv()
            outcome = _run(call, state)
            connection.send(outcome)


def _run(call: TestCall, state: GlobalState) -> Outcome:
    from _pytest.outcomes import Skipped

    state.reset()
    try:
        instance = getattr(importlib.import_module(call.module), call.class_name)()
        getattr(instance, call.method)(**call.arguments)
    except Skipped as skipped:
        return Outcome("skipped", str(skipped.msg))
    except BaseException as error:
        # Frames of the harness say nothing; the rest starts in the test.
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        return Outcome("failed", "".join(traceback.format_exception(type(error), error, frames)))
    return Outcome("passed")


class GlobalState:
    """Process-global state of torch, DeepSpeed, accelerate and Transformers, as it is at the start of each test.

    The default process group stays, and with it DeepSpeed's handle on it; other groups are destroyed, because a suite
    would otherwise pile up threads and sockets.
    """

    def __init__(self, setup: RankSetup) -> None:
        import deepspeed
        import torch

        torch.set_num_threads(1)
        # DeepSpeed compiles its shared-memory all-reduce (minutes) wherever gloo is used, but only inference calls it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        _compile_cpu_adam_quickly()
        if setup.device == "cuda":
            torch.cuda.set_device(setup.rank)
        if setup.init_distributed:
            _form_group(setup)
        self._libraries = LibraryState()
        self._environment = dict(os.environ)
        gc.collect()
        gc.freeze()  # what is imported by now need not be searched for garbage after each test

    def reset(self) -> None:
        """Put everything back. All ranks have finished the test before when this is called."""
        import numpy
        import torch

        self._libraries.reset()
        gc.collect()
        os.environ.clear()
        os.environ.update(self._environment)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.manual_seed(SEED)
        numpy.random.seed(SEED)
        random.seed(SEED)


class LibraryState:
    """What DeepSpeed, accelerate and Transformers keep of ranks and configurations, as it is when this is made."""

    def __init__(self) -> None:
        from deepspeed.utils import groups

        self._groups = {name: value for name, value in vars(groups).items() if _is_state(name, value)}

    def reset(self) -> None:
        """Put it back, and destroy all groups but that of the world."""
        import torch.distributed as dist
        from deepspeed.utils import groups

        _destroy_engines()
        for name, value in self._groups.items():
            setattr(groups, name, value.copy() if isinstance(value, dict | list) else value)
        # What no test has imported has no state yet.
        if "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        if "transformers.integrations.deepspeed" in sys.modules:
            from transformers.integrations.deepspeed import unset_hf_deepspeed_config

            unset_hf_deepspeed_config()
        if dist.is_initialized():
            for group in list(dist.distributed_c10d._world.pg_map):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)
        _forget_groups()


def _destroy_engines() -> None:
    """Free the buffers of DeepSpeed's engines, which their own hooks on parameters keep alive.

    ZeRO's bucket is 2 GB of address space, although nothing is written there. Some dozens of them are one mapping larger than the
    memory, with which a process cannot be forked any more, as data loaders do.
    """
    from deepspeed import DeepSpeedEngine, comm

    if not comm.is_initialized():
        return  # since the last time none was made
    for engine in [x for x in gc.get_objects() if isinstance(x, DeepSpeedEngine)]:
        engine.destroy()


def _forget_groups() -> None:
    """Let go of groups that are destroyed: the last reference to one ends its threads, which wake up 100 times a second.

    DeepSpeed keeps a model that it has trained under ZeRO-3, and with it the axes of its ring.
    """
    if (comm := sys.modules.get("ds_sparse_ring.comm")) is None:
        return
    names = [field.name for field in fields(comm.Axes) if field.name.endswith("_group")]
    for axes in [x for x in gc.get_objects() if isinstance(x, comm.Axes)]:
        for name in names:
            object.__setattr__(axes, name, None)  # it is frozen


def _compile_cpu_adam_quickly() -> None:
    """Have DeepSpeed's CPU Adam compiled without optimisation and debug information, in half the time: models here are small."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().get_op_builder("CPUAdamBuilder")
    flags = builder.cxx_args
    builder.cxx_args = lambda self: [*flags(self), "-O0", "-g0"]  # the last of their kind count


def _is_state(name: str, value: Any) -> bool:
    return not name.startswith("__") and (value is None or isinstance(value, int | str | dict | list))


def _form_group(setup: RankSetup) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group(
        "nccl" if setup.device == "cuda" else "gloo",
        init_method=f"file://{setup.store_path}",
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )


def _set_environment(setup: RankSetup) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setup.master_port),
        RANK=str(setup.rank),
        LOCAL_RANK=str(setup.rank),
        WORLD_SIZE=str(setup.world_size),
        LOCAL_WORLD_SIZE=str(setup.world_size),
        LOCAL_SIZE=str(setup.world_size),  # DeepSpeed's CPU accelerator takes it for the number of devices
    )
    if setup.device == "cpu":
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")


def _redirect_output(log_path: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Whatever the streams were (pytest may have captured them), write to the two descriptors, line by line.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _rewrite_assertions(setup: RankSetup) -> None:
    """Install pytest's assertion rewriting, so that a failing assert shows its values as it does in the parent."""
    import pytest

    sys.path[:] = setup.parent_path
    os.chdir(setup.rootdir)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins take a second to load and are not needed
    pytest.Config.fromdictargs({}, ["--rootdir", setup.rootdir, "-p", "no:cacheprovider"])
    del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)
