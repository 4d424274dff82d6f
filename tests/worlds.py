"""A test on several ranks that goes on with fewer of them, as a run whose cluster shrank, or begins with fewer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch.distributed as dist

from tests.worker import LibraryState


class Worlds:
    """Made at the start of a test, on all ranks, before anything of DeepSpeed is.

    Args:
        folder: seen by all ranks, for the files by which they find each other.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._formed = folder, 0
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._libraries, self._backend = LibraryState(), dist.get_backend()

    @contextmanager
    def of(self, size: int) -> Iterator[int]:
        """Within, every ``size`` ranks are a world of their own; gives the number of this rank's.

        All of them have the same to do: DeepSpeed counts the modules that it has seen in a process, and later compares.
        """
        self._form(size)
        yield self._rank // size
        self._form(self._size)  # not after an error: the other ranks would wait for it elsewhere

    def _form(self, size: int) -> None:
        dist.barrier()  # or a rank would close its connections while others are in a collective with it
        self._formed += 1
        self._libraries.reset()
        dist.destroy_process_group()
        deepspeed.comm.comm.cdb = None  # it knows the ranks of the world before
        number, rank = divmod(self._rank, size)
        os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(size)))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        store = f"file://{self._folder / f'world{self._formed}_{number}'}"
        dist.init_process_group(self._backend, init_method=store, rank=rank, world_size=size)
