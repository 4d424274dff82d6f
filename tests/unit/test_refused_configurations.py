"""What users get wrong in files, arguments and commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.disk import DiskFile
from ds_sparse_ring.ds_json import load_ds_json, resolve_auto
from ds_sparse_ring.errors import SparseRingError, refusals_end_the_program
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.integrations.deepspeed import Setup, initialize
from ds_sparse_ring.integrations.trainer import SparseRingTrainer
from ds_sparse_ring.integrations.transformers import attach
from ds_sparse_ring.job import states_of
from ds_sparse_ring.plan_report import parse_tokens, read_job
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.train import finetune, pretrain
from ds_sparse_ring.train.pretrain import PretrainArguments
from tests.unit.parity_model import tiny_model

from .refusals import Wrong, ring, train, written


def section(**values: Any) -> SparseRingConfig:
    return SparseRingConfig.from_deepspeed({"sparse_ring": values})


def file(text: str | bytes) -> Callable[[Path], Any]:
    return lambda path: SparseRingConfig.from_deepspeed(written(path, text))


def setup(**values: Any) -> Setup:
    return Setup(ring(**values), zero_stage=0, micro_batch=1, accumulation=1, dtype="float32", gradient_checkpointing=False)


AUTO: dict[str, Any] = {"gradient_clipping": "auto"}

CONFIGURATIONS = [
    Wrong("a missing file", lambda path: load_ds_json(path / "no.json"), "no.json", "No such file", "give the path"),
    Wrong("a file in another encoding", file(b'{"a": "\xff\xfe"}'), "file.json", "no text in UTF-8", "save it as such"),
    Wrong("a comma too many", file('{"a": 1,}'), "file.json", "line 1", "no trailing commas"),
    Wrong("a comment", file('{"a": 1} // mine'), "file.json", "line 1", "no comments"),
    Wrong("a key twice", file('{"a": 1, "a": 2}'), "file.json", 'the key "a" stands twice', "remove one"),
    Wrong("a number that is none", file('{"a": NaN}'), "file.json", "NaN is no JSON number", "leave the key out"),
    Wrong("a list", file("[1]"), "file.json", "holds list", "between braces"),
    Wrong(
        "nothing at all",
        lambda _: SparseRing.from_deepspeed(None),  # type: ignore[arg-type]
        "DeepSpeed configuration", "NoneType", "give the path",
    ),
    Wrong("no section", file("{}"), "file.json", 'no section "sparse_ring"', 'add "sparse_ring": {}'),
    Wrong("a section of null", file('{"sparse_ring": null}'), 'section "sparse_ring"', "is null", "means the defaults"),
    Wrong(
        "DeepSpeed's own sparse attention",
        file('{"sparse_attention": {}, "sparse_ring": {}}'), "file.json", '"sparse_attention"', "Take it out",
    ),
    Wrong(
        "another sequence parallelism",
        file('{"sequence_parallel_size": 4, "sparse_ring": {}}'), "file.json", '"sequence_parallel_size"', '{"degree": 4}',
    ),
    Wrong("its name in the section", lambda _: section(sp_size=4), "sparse_ring.sp_size", "is unknown", '"degree"'),
    Wrong("a typo", lambda _: section(degre=4), "sparse_ring.degre", "is unknown", 'did you mean "degree"?'),
    Wrong("attention that looks ahead", lambda _: section(causal=False), "sparse_ring.causal", "always causal", "leave it out"),
    Wrong(
        "a key one level too high",
        lambda _: section(price=1e-4), "sparse_ring.price", "is unknown", 'belongs into "selector"',
    ),
    Wrong(
        "a key beside the section",
        file('{"sparse_ring": {}, "layer_chunk_tokens": 64}'), "file.json", '"layer_chunk_tokens"', "move it into the section",
    ),
    Wrong("a selector's name alone", lambda _: section(selector="price"), "selector", "an object", 'write {"kind": "price"}'),
    Wrong("a number for an object", lambda _: section(offload=80), "sparse_ring.offload", "= 80", "an object in braces"),
    Wrong("a word for a list", lambda _: section(dense_layers="0-3"), "dense_layers", '"0-3"', "a list in brackets"),
    Wrong("a number in quotes", lambda _: section(degree="2"), "sparse_ring.degree", '"2"', "should be a valid integer"),
    Wrong("auto", lambda _: section(degree="auto"), "sparse_ring.degree", '"auto"', "leave the key out"),
    Wrong("an unknown selector", lambda _: section(selector={"kind": "best"}), "selector.kind", '"best"', 'use one of "price"'),
    Wrong(
        "a price in per cent",
        lambda _: section(selector={"kind": "price", "price": 5}), "selector.price", "= 5", "less than 1",
    ),
    Wrong(
        "probes beside the default",
        lambda _: section(probe_tokens=32), "sparse_ring.probe_tokens", "has no effect", "leave it out",
    ),
    Wrong(
        "one segment where every query chooses",
        lambda _: section(segment_tokens=None), "sparse_ring.segment_tokens", "keeps each key", "leave it out (512)",
    ),
    Wrong("segments of no whole blocks", lambda _: section(segment_tokens=100), "segment_tokens", "= 100", "use 64 or 128"),
    Wrong(
        "chunks of no token",
        lambda _: section(layer_chunk_tokens=0), "layer_chunk_tokens", "= 0", "greater than or equal to 1",
    ),
    Wrong(
        "pages of no whole blocks",
        lambda _: section(offload={"host_gib": 1, "kv_page_tokens": 100}), "offload.kv_page_tokens", "= 100", "use 64 or 128",
    ),
    Wrong("offload without room", lambda _: section(offload={}), "sparse_ring.offload.host_gib", "is missing", "set it"),
    Wrong(
        "a disk without room",
        lambda _: section(offload={"host_gib": 1, "disk_path": "/nvme"}), "offload.disk_path", '"/nvme"', "needs disk_gib",
    ),
    Wrong(
        "offload of nothing",
        lambda _: setup(offload={"host_gib": 1}), "sparse_ring.offload", "checkpointing is off", "turn it on",
    ),
    Wrong(
        "offload of nothing in a loop",
        lambda _: train(ring(offload={"host_gib": 1})), "sparse_ring.offload", "is off", "turn it on",
    ),
    Wrong(
        "a degree that leaves ranks over",
        lambda _: section(degree=4).check_degree(6), "degree", "the 6 ranks", "use 1, 2, 3 or 6",
    ),
    Wrong(
        "a Ulysses degree that leaves ranks over",
        lambda _: section(ulysses_degree=4).check_degree(6), "ulysses_degree", "the 6 ranks", "use 1, 2, 3 or 6",
    ),
    Wrong(
        "more Ulysses ranks than heads can be shared out to",
        lambda _: section(ulysses_degree=16).check_heads(40, 8),
        "ulysses_degree", "40 query and 8 KV heads", "use 1, 2, 4, 8 or 40",
    ),
    Wrong(
        "inner rings that do not fill the ring",
        lambda _: section(inner_degree=4).check_degree(6), "inner_degree", "6 ranks", "use 1",
    ),
    Wrong("gathering without a number", lambda _: section(inner="gather"), "sparse_ring.inner", '"gather"', "needs inner_degree"),
    Wrong(
        "patterns across KV heads",
        lambda _: section(heads_per_pattern=8).check_heads(16, 4), "heads_per_pattern", "= 8", "use 1, 2 or 4",
    ),
    Wrong("a ring without a launcher", lambda _: ring(degree=2), "sparse_ring.degree", "is 2", "deepspeed launcher"),
    Wrong(
        "a dense layer beyond the last",
        lambda _: attach(tiny_model(), ring(dense_layers=[7])), "dense_layers", "7", "use 0 to 1",
    ),
    Wrong(
        "maps of a layer beyond",
        lambda _: attach(tiny_model(), ring(maps={"layers": [9]})), "maps.layers", "[9]", "use 0 to 1",
    ),
    Wrong("maps of a head beyond", lambda _: attach(tiny_model(), ring(maps={"heads": [4]})), "maps.heads", "[4]", "use 0 to 3"),
    Wrong(
        "auto that nobody fills",
        lambda _: resolve_auto(AUTO, micro_batch=1, world_size=1), "gradient_clipping", '"auto"', "Write values into the file",
    ),
    Wrong(
        "a file that contradicts the arguments",
        lambda _: resolve_auto({"gradient_clipping": 2.0}, micro_batch=1, world_size=1, clip=1.0),
        "gradient_clipping", "2.0 in the file and 1.0", "make them agree",
    ),
    Wrong(
        "a stage of 5",
        lambda _: states_of({"zero_optimization": {"stage": 5}}), "zero_optimization.stage", "= 5", "use 0, 1, 2 or 3",
    ),
    Wrong(
        "a stage without its object",
        lambda _: states_of({"zero_optimization": 3}), "zero_optimization", "= 3", "between braces",
    ),
    Wrong(
        "an mpu",
        lambda _: initialize(tiny_model(), {"sparse_ring": {}}, mpu=object()), "DeepSpeed", "an mpu", "leave mpu out",
    ),
    Wrong(
        "no arguments of Trainer",
        lambda _: SparseRingTrainer(tiny_model()), "SparseRingTrainer", "needs args", "TrainingArguments(",
    ),
    Wrong("batches of no row", lambda _: PretrainArguments("ds.json", micro_batch=0), "--micro_batch", "0", "give at least 1"),
    Wrong(
        "steps that count backwards",
        lambda _: PretrainArguments("ds.json", save_steps=-1), "--save_steps", "-1", "leave it out",
    ),
    Wrong(
        "evaluations of no row",
        lambda _: PretrainArguments("ds.json", evaluation_steps=5).check_evaluation([]),
        "--evaluation_steps", "no row to evaluate on", "--evaluation_sequences",
    ),
    Wrong(
        "a folder that is not there",
        lambda _: DiskFile("/no/such", 1 << 20), "offload.disk_path", "/no/such", "name an existing folder",
    ),
    Wrong("machines that nobody knows", lambda _: load_hardware("tpu"), "hardware", "'tpu'", "one of h200, h100"),
    Wrong(
        "half a machine",
        lambda path: load_hardware(str(written(path, '{"name": "x"}'))), "file.json", "node_ranks is missing", "Give",
    ),
    Wrong(
        "a machine of no JSON",
        lambda path: load_hardware(str(written(path, b"\xff"))), "file.json", "decode", "Give a JSON object",
    ),
    Wrong("a length in words", lambda _: parse_tokens("many"), "tokens", "'many'", "write 131072, 128K or 1M"),
    Wrong("an endless sequence", lambda _: parse_tokens("inf"), "tokens", "'inf'", "write 131072, 128K or 1M"),
    Wrong(
        "a density in per cent",
        lambda _: read_job(None, "qwen2.5-3b", 64, 1, "h200", 5, None), "--density 5", "no share", "5 % is 0.05",
    ),
    Wrong(
        "more columns than there is",
        lambda _: read_job(None, "qwen2.5-3b", 64, 1, "h200", 0.1, 0.5), "plan", "--columns 0.5", "needs 0 <= columns <= density",
    ),
]  # fmt: skip


@pytest.mark.parametrize("wrong", [pytest.param(wrong, id=wrong.name) for wrong in CONFIGURATIONS])
def test_a_message_says_what_where_and_the_way_out(wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_sparse_ring.disk._async_io", lambda: None)  # is not built here
    wrong.check(tmp_path)


def test_the_table_is_long_and_no_case_stands_twice() -> None:
    assert len({case.name for case in CONFIGURATIONS}) == len(CONFIGURATIONS) >= 20


@pytest.mark.parametrize(("program", "words"), [(pretrain, []), (finetune, ["--model", "no-such-folder"])])
def test_a_program_ends_with_the_message_of_a_refusal(
    program: Any, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--deepspeed", str(tmp_path / "no.json")] if program is pretrain else ["--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["program", *own, *words])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="1"):
        program.main()
    told = capsys.readouterr().err
    assert "error: " in told and ("deepspeed --num_gpus N program" if program is pretrain else "--deepspeed") in told
    assert "Traceback" not in told


def test_of_several_ranks_each_one_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(SystemExit), refusals_end_the_program():
        raise SparseRingError("no room: use more")
    assert capsys.readouterr().err == "[rank 2] error: no room: use more\n"
