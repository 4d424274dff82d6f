"""Where layers keep what: every tensor once, within the budgets, and more room never means less kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_sparse_ring.disk import UNIT_BYTES as DISK_UNIT
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.ladder import TIERS, UNIT_BYTES, Budgets, KeptBytes, Ladder, make_ladder

ORDER = (*TIERS, "recompute")
UNITS = st.integers(0, 40).map(lambda n: n * UNIT_BYTES)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[KeptBytes, int, Budgets, bool]:
    output, every = (draw(st.integers(1, 600)), draw(st.integers(1, 40))), draw(st.sampled_from((1, 1, 2, 3)))
    kept = KeptBytes(draw(st.integers(1, 9)), draw(st.integers(1, 600)), output, inputs_every=every)
    odd = draw(st.integers(0, UNIT_BYTES - 1))
    budgets = Budgets(draw(UNITS) + odd, draw(UNITS) + 1, draw(UNITS), draw(UNITS))
    return kept, draw(st.integers(1, 400)), budgets, draw(st.booleans())


def _made(kept: KeptBytes, tokens: int, budgets: Budgets, keep_outputs: bool) -> Ladder | None:
    try:
        return make_ladder(kept, tokens, budgets, keep_outputs=keep_outputs)
    except SparseRingError:
        return None


@given(_cases())
def test_every_tensor_has_one_place_and_no_budget_is_exceeded(case: tuple[KeptBytes, int, Budgets, bool]) -> None:
    kept, tokens, budgets, keep_outputs = case
    ladder, shard = _made(*case), kept.of_shard(tokens)
    room = {tier: budgets.room(tier, shard.input) // shard.input for tier in TIERS}
    assert (ladder is None) == (sum(room.values()) < kept.inputs), "refused only if there is no way to place the inputs"
    if ladder is None:
        return
    assert len(ladder.inputs) == math.ceil(kept.layers / kept.inputs_every) and "recompute" not in ladder.inputs
    assert len(ladder.outputs) == kept.layers
    assert set(ladder.outputs) <= set(ORDER) and (keep_outputs or set(ladder.outputs) == {"recompute"})
    for tier in TIERS:
        assert ladder.used(tier) <= getattr(budgets, tier)
    if "disk" in ladder.inputs:
        assert shard.input <= budgets.staging
    for places in (ladder.inputs, ladder.outputs):  # the later a layer, the faster its tier
        ranks = [ORDER.index(place) for place in places]
        assert ranks == sorted(ranks, reverse=True)
    if keep_outputs and ladder.recomputed:
        left = (getattr(budgets, tier) - ladder.used(tier) for tier in ("device", "host"))
        assert all(nbytes < sum(shard.output) for nbytes in left)


@given(_cases(), st.sampled_from(["device", "host", "disk", "staging"]), st.integers(1, 3 * UNIT_BYTES))
def test_more_room_never_keeps_less(case: tuple[KeptBytes, int, Budgets, bool], which: str, more: int) -> None:
    kept, tokens, budgets, keep_outputs = case
    before = _made(*case)
    after = _made(kept, tokens, replace(budgets, **{which: getattr(budgets, which) + more}), keep_outputs)
    if before is None:
        return
    assert after is not None and after.recomputed <= before.recomputed
    if which == "device":
        assert after.inputs.count("device") >= before.inputs.count("device")


def test_lines_name_layers_and_budgets() -> None:
    gib = 2**30
    kept = KeptBytes(36, 4096, (4096, 64))
    ladder = make_ladder(kept, 131072, Budgets(4 * gib, 18 * gib, 8 * gib, 2 * gib), keep_outputs=True)
    first, second = ladder.lines()
    assert first == (
        "kept for the backward pass: layers 0-13: input host, attended again; layers 14-27: input host, output disk; "
        "layer 28: input device, output disk; layers 29-35: input device, output host"
    )
    assert second == "in use by it on each rank: device 4.0 of 4.0 GiB, host 17.6 of 18.0 GiB, disk 7.6 of 8.0 GiB"
    assert UNIT_BYTES % DISK_UNIT == 0, "what the ladder counts with is what the store takes"
    fewer = make_ladder(replace(kept, layers=9, inputs_every=2), 131072, Budgets(gib, 5 * gib), keep_outputs=True)
    assert fewer.lines()[0] == (
        "kept for the backward pass: layers 0-2: 1 input in 2 host, attended again; layers 3-5: 1 input in 2 host, output host; "
        "layers 6-8: 1 input in 2 device, output host"
    )


@pytest.mark.parametrize(
    ("budgets", "said"),
    [
        (Budgets(0, 5 * UNIT_BYTES), r"5 in host memory .*host_gib to .* disk_path and disk_gib, .*more ranks \(degree\)"),
        (
            Budgets(UNIT_BYTES, UNIT_BYTES, 3 * UNIT_BYTES, UNIT_BYTES),
            r"1 of them on the device .*3 on the disk .*larger disk_gib",
        ),
        (Budgets(0, UNIT_BYTES, 90 * UNIT_BYTES, UNIT_BYTES - 1), r"0 on the disk .*staging_gib of at least"),
    ],
)
def test_inputs_without_room_are_refused_with_bytes_and_ways_out(budgets: Budgets, said: str) -> None:
    with pytest.raises(SparseRingError, match=rf"8 checkpointed layers for 1024 tokens .*needs {8 * UNIT_BYTES} bytes .*{said}"):
        make_ladder(KeptBytes(8, 16, (16, 1)), 1024, budgets, keep_outputs=True)


def test_room_for_pages_of_keys_and_values_is_reserved() -> None:
    kept = KeptBytes(4, 16, (16,), pages=8)
    ladder = make_ladder(kept, 1024, Budgets(0, 7 * UNIT_BYTES), keep_outputs=True)
    assert ladder.recomputed == 2 and ladder.used("host") == 7 * UNIT_BYTES
    with pytest.raises(SparseRingError, match=f"3 in host memory .*{UNIT_BYTES} more are reserved for keys and values"):
        make_ladder(kept, 1024, Budgets(0, 4 * UNIT_BYTES), keep_outputs=True)
