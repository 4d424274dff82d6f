"""The tier below host memory: tensors pass through staging memory, a part of the slab, to a file and back.

Two threads, one for each direction, wait for copies and call DeepSpeed's op, so the thread that trains waits for the disk only
when staging memory is all in use, or when it gets what was not prefetched early enough.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from ds_sparse_ring.copies import Copies
from ds_sparse_ring.disk import UNIT_BYTES, DiskFile
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.slab import FreeList, Regions


class DiskTier:
    """A file with its free list, and the staging memory ``begin`` to ``end`` of the slab. Not for several threads at once."""

    def __init__(self, file: DiskFile, copies: Copies, begin: int, end: int) -> None:
        self.pieces, self.staging = FreeList(0, file.nbytes, UNIT_BYTES), FreeList(begin, end, UNIT_BYTES)
        self._file, self._copies = file, copies
        self._stages = Regions(self.staging, copies.passed)
        # one thread each: the op spreads a transfer over threads of its own
        self._reader, self._writer = (ThreadPoolExecutor(1, f"store-{name}") for name in ("reads", "writes"))
        self._jobs: list[tuple[Future[Any], int]] = []  # those under way, and their pieces of staging memory
        self._failure: BaseException | None = None

    def put(self, x: Tensor) -> tuple[int, Future[Any]]:
        """Write a tensor without gaps that the free lists have room for; returns its place in the file and the job."""
        size = self.pieces.padded(x.numel() * x.element_size())
        begin, fences = self._stage(size)
        place = self.pieces.take(size)
        assert place is not None, "the store looks whether there is room"
        self._copies.numbers.count("disk", size)
        copied = self._copies.to_host(x, begin, fences)
        job = self._writer.submit(self._write, begin, size, place, copied)
        self._jobs.append((job, begin))
        return place, job

    def fetch(self, place: int, written: Future[Any], buffer: Tensor, usable: Any) -> Future[Any]:
        """Read a tensor into a buffer that the event ``usable`` frees; the job returns the event of the copy into it."""
        begin, fences = self._stage(size := self.pieces.padded(buffer.numel() * buffer.element_size()))
        job = self._reader.submit(self._read, begin, fences, size, place, written, buffer, usable)
        self._jobs.append((job, begin))
        return job

    def drop(self, place: int) -> None:
        """Free a place in the file. Writes are in order, and a read that is late for the next one is of no use to anybody."""
        self._copies.numbers.count("disk", place - self.pieces.give(place))

    def settle(self) -> None:
        """Free the staging memory of jobs that are done; the copy from it to the device may still be under way."""
        jobs, self._jobs = self._jobs, []
        for job, begin in jobs:
            if not job.done():
                self._jobs.append((job, begin))
                continue
            self._failure = self._failure or job.exception()
            self._copies.numbers.count("host", -self._stages.give(begin, None if job.exception() else job.result()))

    def check(self) -> None:
        """Raise what went wrong since the last call, once.

        Raises:
            SparseRingError: a transfer failed.
        """
        failure = self.forget_failure()
        if failure is not None:
            raise SparseRingError(f"store: a transfer of the disk tier failed: {failure}") from failure

    def forget_failure(self) -> BaseException | None:
        """What went wrong since the last call."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Wait for the jobs under way and give the disk its room back."""
        for pool in (self._reader, self._writer):
            pool.shutdown()
        self._file.close()

    def _stage(self, size: int) -> tuple[int, list[Any]]:
        """A piece of staging memory; the host waits for the disk while there is none."""
        while (taken := self._stages.take(size)) is None:
            wait([job for job, _ in self._jobs], return_when=FIRST_COMPLETED)
            self.settle()
        self._copies.memory.ready(taken[0], taken[0] + size)
        self._copies.numbers.count("host", size)
        return taken

    def _write(self, begin: int, size: int, place: int, copied: Any) -> None:
        """Staging memory to the file, after the copy into it. In the writer's thread."""
        self._copies.streams.block(copied)
        self._file.write(self._copies.memory.bytes[begin : begin + size], place)
        self._copies.numbers.written_bytes += size

    def _read(
        self, begin: int, fences: list[Any], size: int, place: int, written: Future[Any], buffer: Tensor, usable: Any
    ) -> Any:
        """The file to staging memory, after the last copy out of that, and on to the device. In the reader's thread."""
        written.result()
        for event in fences:
            self._copies.streams.block(event)
        self._file.read(self._copies.memory.bytes[begin : begin + size], place)
        self._copies.numbers.read_bytes += size
        return self._copies.to_device(buffer, begin, [usable])
