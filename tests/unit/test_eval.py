"""Evaluation by lm-eval on a tiny model and tiny texts: all tasks of RULER, books, sparse prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.inference import SparsePrefill
from ds_sparse_ring.integrations.transformers import attach
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.train.data import train_tokenizer

from .parity_model import VOCABULARY, section, tiny_model

WORDS = (
    "the a special magic number for is following text answer question document grass green sky blue sun yellow there back again"
)


def prompt(tokens: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_a_sparse_prompt_gives_the_logits_of_the_ring_and_the_full_index_those_of_sdpa() -> None:
    model, ids = tiny_model().eval(), prompt(300)
    dense = model(ids).logits
    ring = SparseRing(SparseRingConfig(**section("price")))
    batch = ring.sequence_batch({"input_ids": ids})
    with attach(model, ring):
        expected = ring.gather(model(**batch).logits, batch["sparse_ring"])
    with SparsePrefill(model, SparseRingConfig(**section("price"))) as prefill:
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        kept = prefill.ring.meter.pop()
        assert 0.1 < kept["density"] < 0.9 and 0.1 < kept["recall"] < 1
    assert not torch.allclose(expected, dense, atol=1e-2), "the index leaves something out"
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(ids).logits, dense)
    both = torch.cat([ids, ids.flip(1)])
    with SparsePrefill(model, SparseRingConfig(**section())):
        torch.testing.assert_close(model(both).logits, torch.cat([dense, model(both[1:]).logits]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", [1, "model.layers.1.self_attn"])
@torch.no_grad()
def test_a_layer_that_trains_densely_evaluates_densely(layer: int | str) -> None:
    model, ids = tiny_model().eval(), prompt(300)
    config = SparseRingConfig(**section("price", dense_layers=[layer]))
    ring = SparseRing(config)
    batch = ring.sequence_batch({"input_ids": ids})
    with attach(model, ring):
        expected = ring.gather(model(**batch).logits, batch["sparse_ring"])
    with SparsePrefill(model, config):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    with SparsePrefill(model, SparseRingConfig(**section("price"))):
        assert not torch.allclose(model(ids).logits, expected, atol=1e-3), "one layer more is sparse"


@torch.no_grad()
def test_replies_are_generated_over_the_cache_of_a_sparse_prompt() -> None:
    model, ids = tiny_model().eval(), prompt(300)
    reply: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), **reply)
    with SparsePrefill(model, SparseRingConfig(**section())):
        assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **reply), whole)
    with SparsePrefill(model, SparseRingConfig(**section("price"))) as prefill:
        assert model.generate(ids, **reply).shape == (1, 306)
        assert prefill.ring.meter.pop()["density"] < 0.9


def test_prompts_that_it_would_get_wrong_are_refused() -> None:
    model, ids = tiny_model().eval(), prompt(100)
    with SparsePrefill(model, SparseRingConfig(**section("price"))):
        with pytest.raises(SparseRingError, match="no padding.*one by one"):
            model(ids, attention_mask=(torch.arange(100) > 3).long()[None])
        with pytest.raises(SparseRingError, match="position_ids restart"):
            model(ids, position_ids=torch.arange(100)[None] % 50)
        with pytest.raises(SparseRingError, match="model.eval"):
            model.train()(ids)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ with its tokenizer, ruler/ with RULER's three files, book.txt, ds.json."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("eval")
    torch.manual_seed(0)
    import lm_eval.tasks

    tasks = Path(lm_eval.tasks.__path__[0], "ruler")  # their prompts: with a poorer tokenizer they would be too long
    texts = [path.read_text(encoding="utf-8") for path in sorted(tasks.glob("*_utils.py"))]
    train_tokenizer([*texts, f"{WORDS}. " * 30], folder / "model", vocab_size=1500)
    words = len(AutoTokenizer.from_pretrained(folder / "model"))
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=words, num_key_value_heads=1, max_position_embeddings=8192, initializer_range=0.2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    ruler = folder / "ruler"
    ruler.mkdir()
    (ruler / "PaulGrahamEssays.json").write_text(json.dumps({"text": f"{WORDS.capitalize()}.  " * 300}))
    answers = [{"text": text} for text in ("green", "a colour that is not there")]
    questions = [{"question": f"Which colour {i}?", "answers": answers, "is_impossible": False} for i in range(3)]
    paragraphs = [{"context": f"Document {i}: the grass is green.", "qas": questions} for i in range(20)]
    (ruler / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hotpot = [{"question": f"Is {i} blue?", "answer": "yes", "context": [[f"Sky {i}", ["It is blue."]]]} for i in range(20)]
    (ruler / "hotpotqa.json").write_text(json.dumps(hotpot))
    (folder / "book.txt").write_text(f"{WORDS}. " * 60)
    selector = {"kind": "price", "price": 1e-2}
    (folder / "ds.json").write_text(json.dumps({"sparse_ring": {"selector": selector, "segment_tokens": 128}}))
    return folder


def evaluate(files: Path, *words: str) -> Any:
    from ds_sparse_ring.eval.__main__ import app

    return CliRunner().invoke(app, ["--model", str(files / "model"), "--ruler-data", str(files / "ruler"), *words])


def test_all_tasks_of_ruler_are_made_from_files_and_scored_as_ruler_does(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's replies are the answers; of QA's aliases one."""
    from ds_sparse_ring.eval.language_model import LongTextLM
    from ds_sparse_ring.eval.ruler import QA, RULER

    asked: list[str] = []

    def answer(lm: LongTextLM, requests: Any, **_: Any) -> list[str]:
        asked.extend(request.args[0] for request in requests)
        answers = [request.doc["outputs"] for request in requests]
        return [
            f"It is {of[0].upper() if request.task_name in QA else ' '.join(of)}!"
            for request, of in zip(requests, answers, strict=True)
        ]

    monkeypatch.setattr(LongTextLM, "generate_until", answer)
    result = evaluate(files, "--tasks", "ruler", "--lengths", "8K", "--samples", "2", "--output", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    lines = {line["task"]: line for line in json.loads((tmp_path / "out.json").read_text())}
    assert set(lines) == set(RULER) and len(RULER) == 13
    assert all((line["samples"], line["score"], line["length"]) == (2, 1.0, 8192) for line in lines.values())
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    lengths = [len(tokenizer(text).input_ids) for text in asked]
    assert len(lengths) == 26 and max(lengths) <= 8192 and sum(length > 4096 for length in lengths) >= 16


def test_dense_and_sparse_prompts_and_books(files: Path, tmp_path: Path) -> None:
    lines = {}
    for kind, words in (("dense", ()), ("sparse", ("--sparse", str(files / "ds.json")))):
        out = tmp_path / f"{kind}.json"
        tasks = ("--tasks", "niah_single_1,books", "--book", str(files / "book.txt"), "--lengths", "1K", "--samples", "1")
        result = evaluate(files, *tasks, "--output", str(out), *words)
        assert result.exit_code == 0, result.output
        needle, book = json.loads(out.read_text())
        assert (needle["task"], needle["attention"], book["task"]) == ("niah_single_1", kind, "books")
        assert 0 <= needle["score"] <= 1 and needle["samples"] == 1
        lines[kind] = (needle, book)
    assert "density" not in lines["dense"][0]
    assert all(0 < line["density"] < 1 and 0 < line["recall"] <= 1 for line in lines["sparse"])
    text = (files / "book.txt").read_text()
    assert lines["dense"][1]["bits_per_byte"] == pytest.approx(plain_bits(files, text), rel=1e-4)
    assert lines["sparse"][1]["bits_per_byte"] == pytest.approx(lines["dense"][1]["bits_per_byte"], rel=0.1)
    assert lines["sparse"][1]["bits_per_byte"] != lines["dense"][1]["bits_per_byte"]


@torch.no_grad()
def plain_bits(files: Path, text: str) -> float:
    """In windows of 1024 targets, the first after the prefix token, later ones after the last token before them."""
    tokenizer, model = AutoTokenizer.from_pretrained(files / "model"), LlamaForCausalLM.from_pretrained(files / "model").eval()
    ids = [tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
    assert len(ids) > 1100, "more than one window"
    total = 0.0
    for first in range(0, len(ids) - 1, 1024):
        last = min(first + 1024, len(ids) - 1)
        begin = max(0, last - 1024)  # the last window has as much before its targets as fits
        tokens = torch.tensor([ids[begin : last + 1]])
        losses = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits[0], tokens[0, 1:], reduction="none")
        total += float(losses[first - begin :].sum())
    return total / torch.log(torch.tensor(2.0)).item() / len(text.encode())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "rular"], "task 'rular' is not known: use ruler, niah, niah_single_1"),
        (["--tasks", "books"], "books needs texts: give --book"),
        (["--tasks", "books", "--book", "no.txt"], "no.txt is not there"),
        (["--tasks", "ruler", "--ruler-data", "."], "niah_single_2 needs PaulGrahamEssays.json, which is not in ."),
        (["--lengths", "long"], "no number of tokens"),
        (["--lengths", "4K,512"], "prompts of 512 tokens are too short for RULER: give at least 1024"),
    ],
)
def test_what_is_missing_is_said_before_the_model_is_loaded(files: Path, words: list[str], message: str) -> None:
    result = evaluate(files, *words)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
