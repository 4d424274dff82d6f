"""What users get wrong about batches, texts, prepared rows, checkpoints and recordings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.batch import shard_batch
from ds_sparse_ring.bench.index import _Shape as Shape
from ds_sparse_ring.bench.index import load as load_recorded
from ds_sparse_ring.bench.recorded import RecordedIndex
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.resume import StepShape, set_universal
from ds_sparse_ring.integrations.transformers import attach
from ds_sparse_ring.run_log import read_run
from ds_sparse_ring.train.data import load_documents, tokenize_documents
from ds_sparse_ring.train.packing import pack_lengths
from ds_sparse_ring.train.pretrain import PretrainArguments, Pretraining
from ds_sparse_ring.train.rows import load_prepared, open_rows, packed_dataset
from tests.unit.parity_model import Row, make_batch, tiny_model, word_tokenizer

from .reference import bound
from .refusals import Wrong, ring, written

TOKENS = torch.ones(2, 8, dtype=torch.int64)


def batch(**change: Any) -> Callable[[Path], Any]:
    given = {"input_ids": TOKENS, "labels": TOKENS, **change}
    return lambda _: shard_batch(given, kind="striped", ranks=2, rank=0, segment_tokens=None)


def attend(q: Any, k: Any) -> Callable[[Path], Any]:
    return lambda _: sparse_ring_attention(q, k, k, bound([64], backend="torch")[2], layer=0, scale=1.0)


def text(content: str | bytes, name: str) -> Callable[[Path], Any]:
    return lambda path: load_documents([written(path, content, name)])


def one_of_many(path: Path) -> Any:
    for i in range(9):
        written(path, b"\x92" if i == 7 else "text", f"{i}.txt")
    return load_documents([path])


def streamed(content: bytes | str, names: str) -> Callable[[Path], Any]:
    """Two files and a third with this content, read as a stream."""

    def read(path: Path) -> Any:
        for i in range(3):
            written(path, content if i == 2 else '{"text": "text"}\n', names.format(i))
        return list(load_documents([path], streaming=True))

    return read


def pack(path: Path, *, evaluation_sequences: int = 0) -> Any:
    options: dict[str, Any] = {"sequence_tokens": 64, "evaluation_sequences": evaluation_sequences, "seed": 0}
    return packed_dataset([path], with_an_end(), **options)


def with_an_end() -> Any:
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "2"
    return tokenizer


def words_beyond_the_model(_: Path) -> None:
    owner, model = ring(), tiny_model()
    attach(model, owner)
    model(**owner.sequence_batch({"input_ids": TOKENS + 63}))


def words_beyond_the_model_of_a_script(_: Path) -> None:
    run: Any = Pretraining.__new__(Pretraining)
    run.args, run.ring, run.device = PretrainArguments("ds.json"), ring(), torch.device("cpu")
    run.engine = SimpleNamespace(module=tiny_model(), basic_optimizer=None, config={})
    run.check_first_batch(run.ring.sequence_batch({"input_ids": TOKENS + 63})["sparse_ring"])


def of_another_ring(_: Path) -> None:
    ring(layout="zigzag").bind(ring().sequence_batch({"input_ids": TOKENS})["sparse_ring"])


def half_labelled(_: Path) -> None:
    owner = ring()
    owner.count_targets(
        [owner.sequence_batch({"input_ids": TOKENS, "labels": TOKENS}), owner.sequence_batch({"input_ids": TOKENS})]
    )


def gathered_from_another(_: Path) -> None:
    owner = ring()
    owner.gather(torch.zeros(1, 9), owner.sequence_batch({"input_ids": TOKENS})["sparse_ring"])


def packed_without_a_ring(_: Path) -> None:
    model = tiny_model().eval()
    attach(model, ring())
    given = make_batch([Row((30, 20))], 1)
    model(input_ids=given["input_ids"], position_ids=given["position_ids"])


def on_other_ranks(path: Path, *, files: int = 8, **ds: Any) -> None:
    of_ranks(path, 8, files)
    StepShape(4, 4, 1).check(path, ds)


def of_ranks(path: Path, ranks: int, files: int) -> None:
    """What Trainer leaves of a checkpoint, with empty files of DeepSpeed's."""
    StepShape(ranks, ranks, 1).save(path)
    written(path, "global_step3", "latest")
    (path / "global_step3").mkdir()
    for rank in range(files):
        written(path / "global_step3", "", f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def of_a_stream(path: Path) -> None:
    run: Any = Pretraining.__new__(Pretraining)
    (path / "checkpoints").mkdir()
    written(path / "checkpoints", "step3", "latest")
    run.args, run.ring, run.stream = PretrainArguments("ds.json", output=str(path)), ring(), None
    loaded = ("step3", {"step": 3, "stream": {}})
    run.engine = SimpleNamespace(load_universal_checkpoint=lambda: False, load_checkpoint=lambda folder, tag: loaded)
    run.resume()


def into_the_folder_of_another(path: Path, name: str, text: str, **options: Any) -> None:
    (path / name).parent.mkdir(exist_ok=True)
    written(path, text, name)
    PretrainArguments("ds.json", output=str(path), **options).check_output()


def with_other_steps(path: Path) -> None:
    StepShape(4, 4, 2).save(path)
    StepShape(4, 4, 1).check(path, {})


def with_another_degree(path: Path) -> None:
    StepShape(4, 4, 1).save(path)
    StepShape(4, 2, 2).check(path, {})


def both_data_and_text(path: Path) -> None:
    options: dict[str, Any] = {"sequence_tokens": 64, "evaluation_sequences": 0, "seed": 0, "streaming": False}
    open_rows(str(path), ["corpus/"], word_tokenizer(), **options)


SHAPE = Shape(2, 1, 8, torch.float32, "cpu")
HOLES = torch.tensor([[1, 0, 1, 1, 0, 0, 0, 0]] * 2)
PREPARED = """{"sequence_tokens": 64, "documents": 1, "tokens": 1, "longest": 1, "median": 1, "cut": 0, "rows": 1,
"evaluation_rows": 0, "padding": 0, "filled": 1, "vocabulary": 9}"""

INPUTS = [
    Wrong(
        "a list of rows",
        lambda _: ring().sequence_batch([TOKENS]), "batch", "is a list", "give tensors by name",  # type: ignore[arg-type]
    ),
    Wrong("embeddings", batch(input_ids=None), "'input_ids' is missing", "found ['labels']", "give tokens"),
    Wrong("types of tokens", batch(token_type_ids=TOKENS), "batch", "token_type_ids", "Drop the others in the collator"),
    Wrong("labels of another length", batch(labels=TOKENS[:, :7]), "'labels'", "(2, 7)", "must be [batch, sequence]"),
    Wrong("a row without a batch", batch(input_ids=TOKENS[0], labels=None), "'input_ids'", "(8,)", "must be [batch, sequence]"),
    Wrong("labels as a list", batch(labels=[[1] * 8] * 2), "'labels'", "is a list", "collate it first"),
    Wrong("tokens as floats", batch(input_ids=TOKENS.float()), "'input_ids'", "torch.float32", "it must be int64 or int32"),
    Wrong("labels that a loss does not take", batch(labels=TOKENS.int()), "'labels'", "torch.int32", "it must be int64"),
    Wrong("-100 for padding", batch(input_ids=TOKENS * -100), "'input_ids'", "-100", "pad_token_id"),
    Wrong("-1 for padding", batch(labels=TOKENS * -1), "'labels'", "holds -1", "mark what is no target with -100"),
    Wrong("nothing but padding", batch(attention_mask=TOKENS * 0), "batch", "no token", "leave out rows without any"),
    Wrong("a mask with holes", batch(attention_mask=HOLES), "attention_mask of row 0", "has holes", "restart position_ids"),
    Wrong(
        "documents by numbers in a mask",
        batch(attention_mask=TOKENS * 2), "row 0", "other than 0 and 1", "restart position_ids",
    ),
    Wrong(
        "a mask for each head",
        batch(attention_mask=torch.ones(2, 1, 8, 8)), "'attention_mask'", "(2, 1, 8, 8)", "must be [batch, sequence]",
    ),
    Wrong("a batch that is shifted", batch(shift_labels=TOKENS), "batch", "shifted already", "once, with unshifted 'labels'"),
    Wrong(
        "bounds without positions",
        batch(cu_seq_lens_q=torch.tensor([0, 8])), "batch", "cu_seq_lens_q", "return_position_ids=True",
    ),
    Wrong("words beyond the model's", words_beyond_the_model, "batch", "is 64, and the model has 64 words", "use the tokenizer"),
    Wrong(
        "words beyond the model's in the first batch of a script",
        words_beyond_the_model_of_a_script, "batch", "is 64, and the model has 64 words", "use the tokenizer",
    ),
    Wrong("a batch of another ring", of_another_ring, "batch", "'striped'", "shard it with the collator of the ring"),
    Wrong("labels in one batch only", half_labelled, "count_targets", "batches [1] of 2 have none", "'labels'"),
    Wrong("outputs of another batch", gathered_from_another, "gather", "(1, 9)", "give [1, tokens, ...]"),
    Wrong("no batch", lambda _: ring().count_targets([]), "count_targets", "none was given", "SparseRing.sequence_batch"),
    Wrong(
        "packed rows without a ring",
        packed_without_a_ring, "position_ids", "restart within a row", "SparseRing.sequence_batch",
    ),
    Wrong(
        "queries of another length",
        attend(torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 8)), "attention", "(1, 2, 9, 8)", "unchanged",
    ),
    Wrong(
        "queries without a batch",
        attend(torch.zeros(2, 64, 8), torch.zeros(2, 64, 8)), "attention", "(2, 64, 8)", "unchanged",
    ),
    Wrong(
        "keys of another dtype",
        attend(torch.zeros(1, 2, 64, 8), torch.zeros(1, 2, 64, 8).half()), "attention", "float16", "need one dtype",
    ),
    Wrong("a pattern without a file", lambda path: load_documents([path / "*.txt"]), "text", "matches no file", "give a file"),
    Wrong("text in another encoding", text(b"\xff\xfe\x00", "a.txt"), "a.txt", "no text in UTF-8", "convert it"),
    Wrong("one file of many in another encoding", one_of_many, "7.txt is", "no text in UTF-8", "leave it out"),
    Wrong("a stream in another encoding", streamed(b"\x92", "{}.txt"), "2.txt is", "no text in UTF-8", "leave it out"),
    Wrong(
        "a stream of JSON lines in another encoding",
        streamed(b'{"text": "\x92"}\n', "{}.jsonl"), "2.jsonl is", "no text in UTF-8", "convert it",
    ),
    Wrong(
        "a stream of no JSON",
        streamed('{"text": "a"}\n{"text": \n', "{}.jsonl"), "2.jsonl cannot", "read as json", "one object a line",
    ),
    Wrong(
        "JSON lines in another encoding",
        text(b'{"text": "\x92"}\n', "a.jsonl"), "a.jsonl is", "no text in UTF-8", "convert it",
    ),
    Wrong(
        "JSON lines of no JSON",
        text('{"text": "a"}\n{"text": \n', "a.jsonl"), "a.jsonl", "cannot be read as json", "one object a line",
    ),
    Wrong("records without text", text('{"content": "a"}\n', "a.jsonl"), "records", "['content']", "one called 'text' is needed"),
    Wrong("numbers for text", text('{"text": 1}\n', "a.jsonl"), "the column 'text'", "int64", "convert it, it must be text"),
    Wrong(
        "tokens that are no whole numbers",
        text('{"input_ids": [0.5]}\n', "a.jsonl"), "'input_ids'", "float64", "whole numbers",
    ),
    Wrong(
        "a saved data set in pieces",
        lambda path: load_documents([written(path, "{}", "state.json").parent]), "text", "is not whole", "save it again",
    ),
    Wrong("empty files", lambda path: pack(written(path, "", "a.txt").parent), "text", "are empty", "give files with text"),
    Wrong(
        "more evaluation than text",
        lambda path: pack(written(path, "3 4 5", "a.txt").parent, evaluation_sequences=9),
        "text", "9 evaluation", "give more text",
    ),
    Wrong(
        "rows of no whole blocks",
        lambda _: pack_lengths([10], sequence_tokens=200), "sequence_tokens", "got 200", "near it is 192",
    ),
    Wrong(
        "a tokenizer without an end",
        lambda _: tokenize_documents(["1"], word_tokenizer()), "tokenizer", "no eos_token", "set tokenizer.eos_token",
    ),
    Wrong(
        "rows of another program",
        lambda path: load_prepared(path, word_tokenizer()), "data", "has no packing.json", "prepare_data.py",
    ),
    Wrong(
        "rows of another version",
        lambda path: load_prepared(written(path, '{"words": 1}', "packing.json").parent, word_tokenizer()),
        "packing.json", "words", "prepare the text again",
    ),
    Wrong(
        "rows of another tokenizer",
        lambda path: load_prepared(written(path, PREPARED, "packing.json").parent, word_tokenizer()),
        "data", "vocabulary of 9, the tokenizer has 64", "prepare the text again",
    ),
    Wrong("rows and text", both_data_and_text, "--data", "has its rows already", "leave out --text"),
    Wrong(
        "checkpoints of another run",
        lambda path: into_the_folder_of_another(path, "checkpoints/latest", "step3"), "--output", "latest is there", "--resume",
    ),
    Wrong(
        "a log of another run",
        lambda path: into_the_folder_of_another(path, "metrics.jsonl", '{"step": 1, "loss": 2.0}\n'),
        "--output", "metrics.jsonl is there", "give another --output",
    ),
    Wrong("a checkpoint of a stream", of_a_stream, "resume", "written with --streaming", "go on as it began"),
    Wrong(
        "a checkpoint of other ranks",
        on_other_ranks, "resume", "written by 8 ranks, here are 4", "ds_to_universal --inject_missing_state --input_folder",
    ),
    Wrong(
        "a checkpoint of other ranks with states on disks",
        lambda path: on_other_ranks(path, zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme"}}),
        "offload_optimizer", "written by 8 ranks, here are 4", "start 8 ranks",
    ),
    Wrong(
        "a checkpoint of two runs on other ranks",
        lambda path: on_other_ranks(path, files=9), "global_step3", "optimizer states of 9", "move away",
    ),
    Wrong("a checkpoint of other steps", with_other_steps, "resume", "2 rows a step", "change accumulation steps"),
    Wrong("a checkpoint of another degree", with_another_degree, "resume", "1 rows a step", "with degree = 4 as saved"),
    Wrong(
        "a log of another program",
        lambda path: read_run(written(path, "step 1\n")), "file.json", "one JSON object a line", "give the metrics.jsonl",
    ),
    Wrong(
        "a log of another version",
        lambda path: read_run(written(path, '{"event": "start", "job": {"world": 2}}\n')),
        "file.json", "model is missing", "read it with that one",
    ),
    Wrong(
        "a recording that is not there",
        lambda path: RecordedIndex.load(path / "no.pt"), "no.pt", "No such file", "RecordedIndex.save",
    ),
    Wrong(
        "a recording of text",
        lambda path: RecordedIndex.load(written(path, "text")), "file.json", "no recorded index", "make one with",
    ),
    Wrong(
        "queries of no file",
        lambda path: load_recorded(path / "no.pt", 64, SHAPE), "no.pt", "FileNotFoundError", "give what torch.save",
    ),
    Wrong(
        "queries of text",
        lambda path: load_recorded(written(path, "text"), 64, SHAPE), "file.json", "cannot be read", "give what",
    ),
]  # fmt: skip


@pytest.mark.parametrize("wrong", [pytest.param(wrong, id=wrong.name) for wrong in INPUTS])
def test_a_message_says_what_where_and_the_way_out(wrong: Wrong, tmp_path: Path) -> None:
    wrong.check(tmp_path)


def test_a_run_goes_on_in_its_folder_or_begins_in_one_where_none_has_made_a_step(tmp_path: Path) -> None:
    into_the_folder_of_another(tmp_path, "metrics.jsonl", '{"event": "start", "step": 0}\n')
    into_the_folder_of_another(tmp_path, "checkpoints/latest", "step3", resume=True)


@pytest.mark.parametrize(("ranks", "asked", "converted", "read"), [
    (4, False, False, False), (4, False, True, False), (4, True, True, True), (4, True, False, False), (8, False, True, True),
])  # fmt: skip
def test_a_converted_checkpoint_is_read_where_it_must_or_should_be(
    ranks: int, asked: bool, converted: bool, read: bool, tmp_path: Path
) -> None:
    # a key that is left in the file, for which there is nothing converted, does not matter
    of_ranks(tmp_path, ranks, ranks)
    ds: dict[str, Any] = {"checkpoint": {"load_universal": True, "x": 1}} if asked else {}
    if converted:
        (tmp_path / "global_step3_universal").mkdir()
        written(tmp_path, "global_step3_universal", "latest_universal")
    universal = StepShape(4, 4, 1).check(tmp_path, ds)
    set_universal(ds, universal)
    assert universal == read and (ds.get("checkpoint") or {}).get("load_universal", False) == read
    assert not asked or ds["checkpoint"]["x"] == 1


def test_a_checkpoint_of_another_step_that_is_converted_is_not_read(tmp_path: Path) -> None:
    of_ranks(tmp_path, 8, 8)
    (tmp_path / "global_step2_universal").mkdir()
    written(tmp_path, "global_step2_universal", "latest_universal")
    with pytest.raises(SparseRingError, match="--output_folder .*global_step3_universal"):
        StepShape(4, 4, 1).check(tmp_path, {})


def test_a_checkpoint_that_was_written_again_since_it_was_converted_is_not_read(tmp_path: Path) -> None:
    of_ranks(tmp_path, 8, 8)
    (tmp_path / "global_step3_universal").mkdir()
    latest = Path(written(tmp_path, "global_step3_universal", "latest_universal"))
    assert StepShape(4, 4, 1).check(tmp_path, {})
    os.utime(latest, (1, 1))
    with pytest.raises(SparseRingError, match="convert them, once"):
        StepShape(4, 4, 1).check(tmp_path, {})


def test_states_that_every_rank_holds_whole_need_no_conversion(tmp_path: Path) -> None:
    of_ranks(tmp_path, 8, 0)
    assert not StepShape(4, 4, 1).check(tmp_path, {})


def test_the_table_is_long_and_no_case_stands_twice() -> None:
    assert len({case.name for case in INPUTS}) == len(INPUTS) >= 20
