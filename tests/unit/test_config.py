"""The section "sparse_ring": what is accepted, and what each refusal says."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from ds_sparse_ring.cli import app
from ds_sparse_ring.config import (
    CompleteSelector,
    EveryQuerySelector,
    FixedSelector,
    FullSelector,
    MapsConfig,
    OffloadConfig,
    PriceSelector,
    ScheduleConfig,
    SparseRingConfig,
    TopPSelector,
)
from ds_sparse_ring.errors import SparseRingError

MODELS = [SparseRingConfig, PriceSelector, TopPSelector, FixedSelector, FullSelector, OffloadConfig, MapsConfig, ScheduleConfig]
MODELS += CompleteSelector.__subclasses__()


def read(section: Any, **others: Any) -> SparseRingConfig:
    return SparseRingConfig.from_deepspeed({"sparse_ring": section, **others})


def test_the_defaults_are_the_documented_ones() -> None:
    assert json.loads(read({}).model_dump_json()) == {
        "degree": None,
        "ulysses_degree": 1,
        "inner_degree": None,
        "inner": "ring",
        "layout": "striped",
        "backend": "auto",
        "spare_multiprocessors": 0,
        "selector": {"kind": "every_query", "price": 0.02, "window_blocks": 2, "sink_tokens": 4},
        "segment_tokens": 512,
        "probe": "own",
        "probe_tokens": 64,
        "local_blocks": 2,
        "sink_tokens": 4,
        "heads_per_pattern": None,
        "dense_warmup_steps": 0,
        "dense_layers": [],
        "schedule": None,
        "eval_full_index": False,
        "checkpoint": "output",
        "layer_chunk_tokens": None,
        "layer_inputs_every": 1,
        "offload": None,
        "true_recall_rows": 0,
        "maps": None,
        "timeout_s": 600.0,
        "log_steps": 10,
    }


@pytest.mark.parametrize("model", MODELS)
def test_every_field_says_what_it_means(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        assert name == "kind" or field.description, f"{model.__name__}.{name} has no docstring"


@pytest.mark.parametrize(
    "section",
    [
        {"degree": 2, "layout": "zigzag", "backend": "torch", "checkpoint": "index"},
        {"selector": {"kind": "price"}, "probe": "previous"},
        {"selector": {"kind": "price", "price": 0.5}, "segment_tokens": None},
        {"selector": {"kind": "top_p", "p": 1}, "segment_tokens": None, "heads_per_pattern": 4},
        {"selector": {"kind": "top_p", "min_columns": 3, "max_columns": 3, "max_slashes": 0}},
        {"selector": {"kind": "fixed", "columns": 0, "slashes": 0}, "heads_per_pattern": 2},
        {"selector": {"kind": "full"}, "eval_full_index": True, "dense_warmup_steps": 100, "sink_tokens": 0, "probe_tokens": 1},
        {"selector": {"kind": "top_p"}, "probe_tokens": 1, "local_blocks": 1, "log_steps": 1, "true_recall_rows": 128},
        {"layer_chunk_tokens": 1},
        {"layer_chunk_tokens": 16384, "layer_inputs_every": 4},
        {"maps": {"every": 5, "layers": [0, 7], "heads": [3]}},
        {"layer_chunk_tokens": 16384, "offload": {"host_gib": 64}},
        {"offload": {"host_gib": 64, "kv_page_tokens": 65536}},
        {"offload": {"host_gib": 0.5, "disk_path": "/nvme", "disk_gib": 100, "staging_gib": 1}},
    ],
)
def test_values_mean_what_the_user_set(section: dict[str, Any]) -> None:
    config = read(section)
    dumped = config.model_dump()
    for key, value in section.items():
        assert dumped[key] == value or value.items() <= dumped[key].items()
    assert pickle.loads(pickle.dumps(config)) == config == SparseRingConfig(**section)


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    # numbers out of range, with the unit of the field
    ({"degree": 0}, ["sparse_ring.degree = 0", "greater than or equal to 1", "Ranks that share"]),
    ({"segment_tokens": 0}, ["sparse_ring.segment_tokens = 0", "greater than or equal to 64"]),
    ({"segment_tokens": 100}, ["sparse_ring.segment_tokens = 100", "multiple of 64", "use 64 or 128"]),
    ({"probe_tokens": 65}, ["sparse_ring.probe_tokens = 65", "less than or equal to 64"]),
    ({"probe_tokens": 0}, ["sparse_ring.probe_tokens = 0", "greater than or equal to 1"]),
    ({"local_blocks": 0}, ["sparse_ring.local_blocks = 0", "blocks of 64 tokens"]),
    ({"sink_tokens": -1}, ["sparse_ring.sink_tokens = -1", "greater than or equal to 0"]),
    ({"heads_per_pattern": 0}, ["sparse_ring.heads_per_pattern = 0"]),
    ({"dense_warmup_steps": -1}, ["sparse_ring.dense_warmup_steps = -1"]),
    ({"true_recall_rows": -1}, ["sparse_ring.true_recall_rows = -1"]),
    ({"log_steps": 0}, ["sparse_ring.log_steps = 0"]),
    ({"spare_multiprocessors": -1}, ["sparse_ring.spare_multiprocessors = -1"]),
    ({"maps": {"every": 0}}, ["sparse_ring.maps.every = 0", "Logged steps"]),
    ({"maps": {"layers": [-1]}}, ["sparse_ring.maps.layers", "greater than or equal to 0"]),
    # wrong words
    ({"layout": "stripe"}, ['sparse_ring.layout = "stripe"', "'striped', 'contiguous' or 'zigzag'"]),
    ({"backend": "rocm"}, ['sparse_ring.backend = "rocm"', "'auto', 'cuda', 'triton', 'cpu' or 'torch'"]),
    ({"probe": "next"}, ['sparse_ring.probe = "next"', "'own' or 'previous'"]),
    ({"checkpoint": "all"}, ['sparse_ring.checkpoint = "all"', "'output' or 'index'"]),
    # nothing is converted silently
    ({"degree": "2"}, ['sparse_ring.degree = "2"', "valid integer"]),
    ({"degree": True}, ["sparse_ring.degree = true", "valid integer"]),
    ({"log_steps": 10.0}, ["sparse_ring.log_steps = 10.0", "valid integer"]),
    ({"eval_full_index": 1}, ["sparse_ring.eval_full_index = 1", "valid boolean"]),
    ({"layout": None}, ["sparse_ring.layout = null"]),
    # unknown keys
    ({"local_block": 2}, ["sparse_ring.local_block is unknown", 'did you mean "local_blocks"?']),
    ({"zzz": 2}, ["sparse_ring.zzz is unknown", "allowed are", '"degree"', '"log_steps"']),
    ({"price": 1e-4}, ["sparse_ring.price is unknown", '"selector" of kind "price"']),
    (
        {"selector": {"kind": "price", "prise": 1e-4}},
        ["sparse_ring.selector.prise is unknown", 'did you mean "price"?'],
    ),
    ({"selector": {"kind": "full", "degree": 1}}, ["sparse_ring.selector.degree is unknown", "one level up"]),
    ({"selector": {"kind": "full", "columns": 1}}, ["selector.columns is unknown", '"selector" of kind "fixed"']),
    # selectors
    ({"selector": {}}, ["sparse_ring.selector = {}", 'needs a "kind"', '"price", "top_p", "fixed", "full"']),
    ({"selector": {"kind": "cheap"}}, ['sparse_ring.selector.kind = "cheap"', '"price", "top_p", "fixed", "full"']),
    ({"selector": "price"}, ['sparse_ring.selector = "price"']),
    ({"selector": {"kind": "price", "price": 0}}, ["sparse_ring.selector.price = 0", "greater than 0"]),
    ({"selector": {"kind": "price", "price": 1.0}}, ["sparse_ring.selector.price = 1.0", "less than 1"]),
    ({"selector": {"kind": "price", "price": float("nan")}}, ["sparse_ring.selector.price = NaN"]),
    ({"selector": {"kind": "top_p", "p": 90}}, ["sparse_ring.selector.p = 90", "less than or equal to 1"]),
    ({"selector": {"kind": "fixed", "slashes": -1}}, ["sparse_ring.selector.slashes = -1"]),
    (
        {"selector": {"kind": "top_p", "min_columns": 5, "max_columns": 4}},
        ["sparse_ring.selector.min_columns = 5 is above max_columns = 4", "raise the other"],
    ),
    (
        {"selector": {"kind": "top_p", "min_slashes": 2, "max_slashes": 1}},
        ["sparse_ring.selector.min_slashes = 2 is above max_slashes = 1"],
    ),
    ({"layer_chunk_tokens": 0}, ["sparse_ring.layer_chunk_tokens = 0", "greater than or equal to 1"]),
    ({"layer_chunk_tokens": 1, "layer_inputs_every": 0}, ["sparse_ring.layer_inputs_every = 0", "greater than or equal to 1"]),
    ({"layer_inputs_every": 2}, ["layer_inputs_every = 2 needs layer_chunk_tokens", "set it (e.g. 16384), or leave"]),
    ({"chunk_tokens": 4096}, ["sparse_ring.chunk_tokens is unknown", 'did you mean "layer_chunk_tokens"?']),
    # memory outside the device
    ({"offload": {}}, ["sparse_ring.offload.host_gib is missing", "Pinned host memory, for each rank; GiB"]),
    ({"offload": {"host_gib": 0}}, ["sparse_ring.offload.host_gib = 0", "greater than 0"]),
    ({"offload": {"host_gib": 1, "kv_page_tokens": 100}}, ["kv_page_tokens = 100 is not a multiple of 64: use 64 or 128"]),
    ({"offload": {"host_gib": 1, "kv_page_tokens": 0}}, ["sparse_ring.offload.kv_page_tokens = 0"]),
    ({"kv_page_tokens": 64}, ["sparse_ring.kv_page_tokens is unknown", 'belongs into the object "offload"']),
    ({"offload": {"host_gib": "64"}}, ['sparse_ring.offload.host_gib = "64"', "valid number"]),
    ({"offload": {"host_gb": 1, "host_gib": 1}}, ["sparse_ring.offload.host_gb is unknown", 'did you mean "host_gib"?']),
    ({"offload": {"host_gib": 1, "degree": 2}}, ["sparse_ring.offload.degree is unknown", "one level up"]),
    ({"host_gib": 64}, ["sparse_ring.host_gib is unknown", 'belongs into the object "offload"']),
    ({"offload": {"host_gib": 1, "disk_path": "/x"}}, ['sparse_ring.offload.disk_path = "/x" needs disk_gib']),
    ({"offload": {"host_gib": 1, "disk_gib": 5}}, ["sparse_ring.offload.disk_gib = 5 needs disk_path"]),
    # keys that do not go together
    (
        {"selector": {"kind": "price"}, "probe": "previous", "segment_tokens": None},
        ['sparse_ring.probe = "previous"', "segment_tokens = null", "set segment_tokens", 'probe = "own"'],
    ),
    ({"probe_tokens": 32}, ['probe_tokens = 32 has no effect on selector "every_query"', "asks no probes", "leave it out"]),
    ({"probe": "previous"}, ['probe = "previous" has no effect on selector "every_query"', 'use probe = "own"', '"price"']),
    ({"selector": {"kind": "window"}, "probe": "previous"}, ['no effect on selector "window"', 'use probe = "own"']),
    ({"selector": {"kind": "bigbird"}, "probe_tokens": 1}, ['no effect on selector "bigbird"', "leave it out"]),
    ({"segment_tokens": None}, ["segment_tokens = null", "one segment per document", "set segment_tokens (256 to 1024)"]),
    # Transformers fills every "auto" of the file
    ({"backend": "auto"}, ['sparse_ring.backend = "auto"', "Transformers", "leave the key out"]),
    ({"degree": "auto"}, ['sparse_ring.degree = "auto"', "Transformers"]),
    ({"selector": {"kind": "price", "price": "auto"}}, ['sparse_ring.selector.price = "auto"', "Transformers"]),
    # several at once
    ({"degree": 0, "log_stps": 1}, ["2 problems", "sparse_ring.degree = 0", 'did you mean "log_steps"?']),
]

WAY_OUT = re.compile("should (be|have)|did you mean|belongs|allowed are|needs|use |set |leave |lower |write ")
"""What a message that helps has in it."""


@pytest.mark.parametrize(("section", "parts"), REFUSED, ids=[json.dumps(section) for section, _ in REFUSED])
def test_a_refusal_names_key_value_and_way_out(section: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(SparseRingError) as refusal:
        read(section)
    for part in parts:
        assert part in str(refusal.value)
    assert "pydantic" not in str(refusal.value)
    assert WAY_OUT.search(str(refusal.value)), f"no way out: {refusal.value}"


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({}, ['no section "sparse_ring"', '"sparse_ring": {}']),
        ({"sparse-ring": {}}, ['did you mean it by "sparse-ring"?']),
        ({"sparse_ring": None}, ["is null, not an object", "{}"]),
        ({"sparse_ring": [1]}, ["is [1], not an object"]),
        (
            {"sparse_ring": {}, "sparse_attention": {"mode": "fixed"}},
            ['"sparse_attention"', "Take it out", '"sparse_ring"'],
        ),
        (
            {"sparse_ring": {}, "sequence_parallel_size": 4},
            ['"sequence_parallel_size"', '"sparse_ring": {"degree": 4}'],
        ),
    ],
)
def test_a_file_without_a_usable_section_is_refused(config: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(SparseRingError) as refusal:
        SparseRingConfig.from_deepspeed(config)
    for part in parts:
        assert part in str(refusal.value)


def test_python_and_file_give_the_same_errors(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"sparse_ring": {"local_blocks": 0}}')
    with pytest.raises(SparseRingError) as from_file:
        SparseRingConfig.from_deepspeed(path)
    with pytest.raises(SparseRingError) as from_python:
        SparseRingConfig(local_blocks=0)
    assert str(from_file.value) == str(from_python.value)


def test_the_backend_may_be_auto_in_python_where_transformers_does_not_see_it() -> None:
    assert SparseRingConfig(backend="auto").backend == "auto"


def test_segments_and_patterns_suit_who_chooses() -> None:
    def of(**section: Any) -> tuple[int | None, int | None]:
        config = SparseRingConfig(**section)
        return config.segment_tokens, config.heads_per_pattern

    assert of() == of(selector={"kind": "every_query"}) == of(selector=EveryQuerySelector(price=0.1)) == (512, None)
    assert of(selector={"kind": "price"}) == of(selector=FullSelector()) == (16384, 1)
    assert of(selector={"kind": "price"}, segment_tokens=None, heads_per_pattern=None) == (None, None)
    assert of(segment_tokens=1024, heads_per_pattern=2) == (1024, 2)


def test_a_configuration_cannot_be_changed() -> None:
    config = SparseRingConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.degree = 2  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.selector.kind = "full"  # type: ignore[misc]


@pytest.mark.parametrize(("degree", "world_size", "resolved"), [(None, 1, 1), (None, 6, 6), (2, 6, 2), (1, 5, 1), (5, 5, 5)])
def test_the_degree_divides_the_ranks(degree: int | None, world_size: int, resolved: int) -> None:
    assert SparseRingConfig(degree=degree).check_degree(world_size) == resolved


@pytest.mark.parametrize(
    ("degree", "world_size", "way_out"),
    [(4, 6, "use 1, 2, 3 or 6"), (8, 4, "use 1, 2 or 4"), (2, 1, "use 1, or null"), (3, 7, "use 1 or 7, or null")],
)
def test_a_degree_that_does_not_divide_is_refused_with_the_divisors(degree: int, world_size: int, way_out: str) -> None:
    with pytest.raises(SparseRingError, match=f"degree = {degree} does not divide the {world_size} ranks.*{way_out}"):
        SparseRingConfig(degree=degree).check_degree(world_size)


def test_a_ulysses_degree_divides_the_ranks_and_the_heads() -> None:
    assert SparseRingConfig(ulysses_degree=2, inner_degree=2).check_degree(8) == 8
    with pytest.raises(SparseRingError, match="ulysses_degree = 4 does not divide the 6 ranks that share a sequence: use 1, 2"):
        SparseRingConfig(ulysses_degree=4).check_degree(6)
    with pytest.raises(SparseRingError, match="inner_degree = 4 does not divide the 2 ranks of a ring"):
        SparseRingConfig(ulysses_degree=2, inner_degree=4).check_degree(4)
    for degree in (1, 2, 4, 8, 16):
        SparseRingConfig(ulysses_degree=degree).check_heads(16, 2)
    with pytest.raises(
        SparseRingError, match="ulysses_degree = 3 does not share out 16 query and 2 KV heads: use 1, 2, 4, 8 or 16"
    ):
        SparseRingConfig(ulysses_degree=3).check_heads(16, 2)
    with pytest.raises(SparseRingError, match="heads_per_pattern = 8 does not divide the 4 query heads"):
        SparseRingConfig(ulysses_degree=4, heads_per_pattern=8).check_heads(16, 2)


def test_an_inner_degree_divides_the_ring() -> None:
    assert SparseRingConfig(inner_degree=4).check_degree(8) == 8
    with pytest.raises(SparseRingError, match="inner_degree = 4 does not divide the 6 ranks of a ring: use 1, 2, 3 or 6"):
        SparseRingConfig(degree=6, inner_degree=4).check_degree(12)


def test_gathering_needs_to_know_how_many_ranks() -> None:
    assert SparseRingConfig(inner_degree=4, inner="gather").check_degree(8) == 8
    with pytest.raises(SparseRingError, match=r'sparse_ring.inner = "gather" needs inner_degree.*: set it .* or inner = "ring"'):
        SparseRingConfig(inner="gather")
    with pytest.raises(SparseRingError, match=r'sparse_ring.inner = "all": should be .ring. or .gather.'):
        SparseRingConfig(inner_degree=4, inner="all")


@pytest.mark.parametrize(("per_pattern", "q_heads", "kv_heads"), [(1, 7, 1), (4, 16, 4), (2, 16, 4), (1, 3, 3), (7, 14, 2)])
def test_patterns_that_stay_within_a_kv_head_are_accepted(per_pattern: int, q_heads: int, kv_heads: int) -> None:
    SparseRingConfig(heads_per_pattern=per_pattern).check_heads(q_heads, kv_heads)


@pytest.mark.parametrize(
    ("per_pattern", "q_heads", "kv_heads", "message"),
    [
        (3, 16, 4, "heads_per_pattern = 3 does not divide the 4 query heads.*16 query, 4 KV.*use 1, 2 or 4"),
        (8, 16, 4, "use 1, 2 or 4"),
        (2, 4, 4, "use 1$"),
        (1, 16, 3, "16 query heads for 3 KV heads"),
        (1, 16, 0, "0 KV heads"),
    ],
)
def test_a_pattern_across_kv_heads_is_refused(per_pattern: int, q_heads: int, kv_heads: int, message: str) -> None:
    with pytest.raises(SparseRingError, match=message):
        SparseRingConfig(heads_per_pattern=per_pattern).check_heads(q_heads, kv_heads)


def test_the_command_shows_the_section_with_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"sparse_ring": {"degree": 2, "selector": {"kind": "top_p", "p": 0.8}}}')
    result = CliRunner().invoke(app, ["config", str(path), "--world", "6"])
    assert result.exit_code == 0, result.output
    for part in ("selector.p", "0.8", "true_recall_rows", "0 (default)", "6 ranks = 3 sequences at once x 2 ranks"):
        assert part in result.output


@pytest.mark.parametrize(
    ("kind", "hidden"),
    [
        ("price", set()),
        ("every_query", {"probe", "probe_tokens", "local_blocks", "sink_tokens"}),
        ("full", {"probe", "probe_tokens", "local_blocks", "sink_tokens", "segment_tokens", "heads_per_pattern"}),
    ],
)
def test_the_command_shows_what_the_selector_reads(kind: str, hidden: set[str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"sparse_ring": {"selector": {"kind": kind}}}))
    result = CliRunner().invoke(app, ["config", str(path)], env={"COLUMNS": "160"})
    first = {words[1] for line in result.output.splitlines() if len(words := line.split()) > 2 and words[0] in "│|"}
    assert set(SparseRingConfig.model_fields) - first - {"selector", "offload", "schedule", "maps"} == hidden
    assert (f'of the section, not read by selector "{kind}"' in result.output) == bool(hidden)


def test_the_command_fails_with_the_message(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"sparse_ring": {"degree": 4}}')
    result = CliRunner().invoke(app, ["config", str(path), "--world", "6"])
    assert result.exit_code == 1
    assert "error: sparse_ring.degree = 4 does not divide the 6 ranks" in result.output


def test_the_report_names_the_libraries() -> None:
    result = CliRunner().invoke(app, ["report"])
    assert result.exit_code == 0, result.output
    for part in ("torch", "deepspeed", "transformers", "accelerate", ">=0.19.8,<0.20"):
        assert part in result.output
