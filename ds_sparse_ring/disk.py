"""A file of a store's tensors, read and written past the page cache by DeepSpeed's asynchronous I/O op (libaio).

The op does not look at the result of a transfer, so little may be left to fail during training: the file's bytes are reserved on
the disk when it is made, and its first ones are written and read back once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.units import GIB

PAGE_BYTES = 4096
_THREADS = 4
UNIT_BYTES = _THREADS * PAGE_BYTES
"""Offsets and sizes of transfers are multiples of it: each thread of the op then has whole pages, as direct I/O wants them."""
_WAY_OUT = (
    "install libaio-dev (apt) or libaio-devel (yum), which DeepSpeed's async_io op needs; `ds_report` shows whether it is found"
)


class DiskFile:
    """``nbytes`` of a file without a name below a folder: the system frees it with the process, however that ends."""

    def __init__(self, folder: str | Path, nbytes: int) -> None:
        """Reserve the bytes and build or load the op (minutes when it is compiled for the first time).

        Raises:
            SparseRingError: no such folder, not enough room, a file system without direct I/O, or an op that cannot be built.
        """
        self.nbytes = nbytes // UNIT_BYTES * UNIT_BYTES
        self._fd = _reserve(Path(folder), self.nbytes)
        op = _async_io()
        self._name = f"/proc/self/fd/{self._fd}"
        # a handle waits for all that it has begun, so each direction has its own
        self._reader, self._writer = (op.aio_handle(1 << 20, 32, False, True, _THREADS) for _ in range(2))
        pattern = torch.arange(UNIT_BYTES, dtype=torch.int64).to(torch.uint8)
        self.write(pattern, 0)
        self.read(back := torch.zeros_like(pattern), 0)
        if not torch.equal(pattern, back):
            raise SparseRingError(f"sparse_ring.offload.disk_path: {folder} does not give back what was written to it")

    def read(self, buffer: Tensor, offset: int) -> None:
        """Fill uint8 ``buffer`` (whole units) from the file; returns when it is done. One thread at a time."""
        self._check(self._reader.sync_pread(buffer, self._name, offset), "read", buffer, offset)

    def write(self, buffer: Tensor, offset: int) -> None:
        """Write uint8 ``buffer`` (whole units) to the file; returns when it is done. One thread at a time, beside a reader."""
        self._check(self._writer.sync_pwrite(buffer, self._name, offset), "written", buffer, offset)

    def close(self) -> None:
        """Give the disk its room back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    @staticmethod
    def _check(operations: int, what: str, buffer: Tensor, offset: int) -> None:
        if operations != 1:
            raise SparseRingError(
                f"disk: {len(buffer)} bytes at {offset} could not be {what} (DeepSpeed printed why): "
                "sparse_ring.offload.disk_path needs a local file system with direct I/O (ext4, xfs)"
            )


def _async_io() -> Any:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise SparseRingError(f"sparse_ring.offload.disk_path: DeepSpeed's async_io op cannot be built here: {_WAY_OUT}")
    try:
        return builder.load(verbose=False)
    except Exception as error:
        raise SparseRingError(
            f"sparse_ring.offload.disk_path: building DeepSpeed's async_io op failed: {error}\n{_WAY_OUT}"
        ) from error


def _reserve(folder: Path, nbytes: int) -> int:
    """Descriptor of a new file of that size, whose name is gone already."""
    try:
        free = shutil.disk_usage(folder).free
        fd, name = tempfile.mkstemp(prefix="ds_sparse_ring_", dir=folder)
    except OSError as error:
        raise SparseRingError(
            f"sparse_ring.offload.disk_path: no file can be made in {folder} ({error.strerror}): name an existing folder on a "
            "local NVMe disk that this user may write to, on every node"
        ) from None
    try:
        os.unlink(name)
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        raise SparseRingError(
            f"sparse_ring.offload.disk_gib: {nbytes / GIB:.2f} GiB cannot be reserved in {folder} ({error.strerror}), where "
            f"{free / GIB:.2f} GiB were free: each rank takes disk_gib for itself; lower it or free some room"
        ) from None
    return fd
