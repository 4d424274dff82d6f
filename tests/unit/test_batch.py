"""From a batch to shards and back: labels, positions, padding, documents, refusals."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_sparse_ring.batch import IGNORE, shard_batch
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import causal_cost
from ds_sparse_ring.layout import BLOCK, LayoutKind

from .reference import packed_batch


def _shards(batch: dict, ranks: int, kind: LayoutKind = "striped") -> list[dict]:
    return [shard_batch(batch, kind=kind, ranks=ranks, rank=r, segment_tokens=128) for r in range(ranks)]


def _whole(shards: list[dict], key: str) -> torch.Tensor:
    return shards[0]["sparse_ring"].layout.unshard([shard[key][0] for shard in shards])


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from(["striped", "contiguous", "zigzag"]),
)
def test_gathering_shards_gives_the_batch_back(lengths: list[int], ranks: int, kind: LayoutKind) -> None:
    batch = packed_batch(lengths)
    shards = _shards(batch, ranks, kind)
    sequence = shards[0]["sparse_ring"]
    for key in ("input_ids", "position_ids"):
        assert torch.equal(sequence.restore(_whole(shards, key)), batch[key])
    assert all(shard["input_ids"].shape == (1, sequence.layout.local_tokens) for shard in shards)
    assert sequence.tokens == sum(lengths)


def test_seven_tokens_on_two_ranks_pad_with_ignored_labels() -> None:
    batch = {"input_ids": torch.arange(7)[None], "labels": torch.arange(7)[None]}
    shards = _shards(batch, 2)
    labels = _whole(shards, "shift_labels")
    assert labels[:6].tolist() == [1, 2, 3, 4, 5, 6]
    assert (labels[6:] == IGNORE).all()
    assert sum(int((s["shift_labels"] != IGNORE).sum()) for s in shards) == 6
    assert (shards[1]["shift_labels"] == IGNORE).all(), "the second rank has no target at all"


def test_labels_are_shifted_across_shard_borders_and_not_across_documents() -> None:
    batch = packed_batch([130, 70])
    batch["labels"] = torch.arange(200)[None] + 1000
    shards = _shards(batch, 3)
    labels = _whole(shards, "shift_labels")
    assert labels[63].item() == 1064 and labels[127].item() == 1128, "targets at block borders"
    assert labels[129].item() == IGNORE, "the last token of a document predicts nothing"
    assert labels[3 * BLOCK].item() == 1131, "the second document starts on a block"
    assert torch.equal(shards[0]["labels"], shards[0]["shift_labels"])


def test_a_seven_token_document_keeps_its_seven_tokens() -> None:
    sequence = _shards(packed_batch([7, 100]), 4)[0]["sparse_ring"]
    assert [d.end - d.begin for d in sequence.documents] == [7, 100]
    assert sequence.layout.blocks == 4


def test_positions_are_made_globally_when_absent() -> None:
    shards = _shards({"input_ids": torch.zeros(1, 300, dtype=torch.long)}, 2)
    assert torch.equal(_whole(shards, "position_ids")[:300], torch.arange(300))
    assert "labels" not in shards[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_either_side_is_dropped(side: str) -> None:
    tokens = torch.arange(1, 101)
    padded = torch.zeros(2, 150, dtype=torch.long)
    mask = torch.zeros(2, 150, dtype=torch.long)
    padded[0], mask[0] = torch.arange(150), 1
    where = slice(50, 150) if side == "left" else slice(0, 100)
    padded[1, where], mask[1, where] = tokens, 1
    shards = _shards({"input_ids": padded, "attention_mask": mask, "labels": padded}, 2)
    sequence = shards[0]["sparse_ring"]
    assert sequence.tokens == 250
    assert torch.equal(_whole(shards, "input_ids")[192:292], tokens)
    assert torch.equal(_whole(shards, "position_ids")[192:292], torch.arange(100))
    assert _whole(shards, "shift_labels")[192].item() == 2
    assert torch.equal(sequence.restore(_whole(shards, "input_ids")), padded * mask)


def test_rows_of_a_batch_are_separate_documents() -> None:
    sequence = _shards({"input_ids": torch.zeros(3, 65, dtype=torch.long)}, 1)[0]["sparse_ring"]
    assert [s.document_begin for s in sequence.segments] == [0, 2, 4]


def test_a_sequence_pickles_and_tells_different_batches_apart() -> None:
    one = _shards(packed_batch([100], seed=1), 2)[1]["sparse_ring"]
    other = _shards(packed_batch([100], seed=2), 2)[1]["sparse_ring"]
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.digest != other.digest


_TOKENS = torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, "'input_ids' is missing"),
        ({"token_type_ids": _TOKENS}, "token_type_ids"),
        ({"labels": _TOKENS[:, :7]}, r"'labels' has shape \(2, 7\)"),
        ({"input_ids": _TOKENS[0]}, r"must be \[batch, sequence\]"),
        ({"attention_mask": torch.zeros(2, 8, dtype=torch.long)}, "no token that the attention mask keeps"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 0, 0, 0, 0]] * 2)}, "row 0 has holes"),
        ({"attention_mask": torch.tensor([[1, 1, 2, 2, 0, 0, 0, 0]] * 2)}, "values other than 0 and 1"),
        ({"shift_labels": _TOKENS}, "sharded or shifted already"),
        ({"attention_mask": torch.ones(2, 1, 8, 8)}, "must be"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 8])}, "return_position_ids=True"),
        ({"labels": [[1] * 8] * 2}, "'labels' is a list"),
    ],
)
def test_batches_that_cannot_be_sharded_are_refused(change: dict, message: str) -> None:
    batch = {"input_ids": _TOKENS, "labels": _TOKENS} | change
    with pytest.raises(SparseRingError, match=message):
        shard_batch(batch, kind="striped", ranks=2, rank=0, segment_tokens=None)


def test_bounds_for_other_kernels_are_accepted_since_positions_say_the_same() -> None:
    batch = packed_batch([5, 6]) | {"cu_seq_lens_q": torch.tensor([0, 5, 11]), "max_length_q": 6}
    assert len(_shards(batch, 1)[0]["sparse_ring"].documents) == 2


@pytest.mark.parametrize("ranks", [1, 3])
def test_causal_pairs_are_those_inside_documents(ranks: int) -> None:
    lengths = [130, 1, 64, 333]
    sequence = shard_batch(packed_batch(lengths), kind="striped", ranks=ranks, rank=0, segment_tokens=None)["sparse_ring"]
    blocks = torch.arange(sum(-(-length // 64) for length in lengths))  # without the layout's padding
    assert sequence.causal_pairs == int(causal_cost(sequence.segments, blocks).sum())
