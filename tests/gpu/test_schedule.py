"""The controller on a GPU: densities are measured beside the device's work, and prices follow from them."""

from __future__ import annotations

import math

import pytest
import torch

from ds_sparse_ring.index import density
from ds_sparse_ring.select import select_index
from tests.unit.reference import bound, global_qkv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_density_is_noted_without_waiting_and_moves_the_price_two_steps_later() -> None:
    ring, sequence, context = bound([8192, 3000], segment_tokens=2048, schedule={"target_density": 0.3, "gain": 0.5})
    q, k, _ = (x.to("cuda", torch.bfloat16) for x in global_qkv(sequence, 4, 2, 64))
    index, controller = select_index(4 * q, k, context, scale=0.25), ring.schedule.controller
    assert controller is not None
    controller.record(0, index, chosen=True)  # makes tables of the segments
    controller.begin_step(0.3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        controller.record(0, index, chosen=True)
        assert controller.price == 1.5e-4
        controller.begin_step(0.3)  # what was noted first has long arrived
    finally:
        torch.cuda.set_sync_debug_mode("default")
    moved = math.log(1.5e-4) + 0.5 * math.log(float(density(index).mean()) / 0.3)
    assert controller.price == pytest.approx(math.exp(moved), rel=1e-5)
