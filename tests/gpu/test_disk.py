"""The disk tier with DeepSpeed's own op; needs libaio, a GPU only for the last test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

from ds_sparse_ring.disk import UNIT_BYTES, DiskFile
from ds_sparse_ring.store import Store
from tests.offloading import train

pytestmark = pytest.mark.skipif(not AsyncIOBuilder().is_compatible(), reason="needs libaio-dev")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def test_what_is_written_is_read_and_the_folder_stays_empty(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, 64 * UNIT_BYTES)
    x = torch.randint(0, 256, (63 * UNIT_BYTES,), dtype=torch.uint8)
    file.write(x, UNIT_BYTES)
    file.read(y := torch.empty_like(x), UNIT_BYTES)
    assert torch.equal(x, y)
    assert not list(tmp_path.iterdir())
    file.close()


@pytest.mark.parametrize("device", DEVICES)
def test_training_is_bit_equal_with_and_without_the_disk(tmp_path: Path, device: str) -> None:
    where = torch.device(device)
    store = Store(where, 0, disk=DiskFile(tmp_path, 64 << 20), staging_bytes=8 << 20, segment_bytes=1 << 20)
    for a, b in zip(train(store, "disk", where, 256, 1024), train(None, "disk", where, 256, 1024), strict=True):
        assert torch.equal(a, b)
    assert store.numbers().written_bytes > 0 < store.numbers().read_bytes
    store.close()
