"""What users get wrong: configurations, models and inputs. Each message says what was found, where, and the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, LlamaConfig, LlamaForSequenceClassification, MistralConfig, Qwen2Config

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.batch import shard_batch
from ds_sparse_ring.bench.index import _Shape as Shape
from ds_sparse_ring.bench.index import load as load_recorded
from ds_sparse_ring.bench.recorded import RecordedIndex
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.disk import DiskFile
from ds_sparse_ring.ds_json import load_ds_json, resolve_auto
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.integrations.chunked_layers import enable_chunked_layers
from ds_sparse_ring.integrations.deepspeed import Setup, initialize
from ds_sparse_ring.integrations.model_checks import check_model
from ds_sparse_ring.integrations.resume import StepShape
from ds_sparse_ring.integrations.tiled_loss import enable_tiled_loss
from ds_sparse_ring.integrations.trainer import SparseRingTrainer
from ds_sparse_ring.integrations.transformers import adopt_gradient_checkpointing, attach
from ds_sparse_ring.job import load_shape, states_of
from ds_sparse_ring.plan_report import parse_tokens, read_job
from ds_sparse_ring.run_log import read_run
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.train.data import load_documents, tokenize_documents
from ds_sparse_ring.train.model import load_config, load_tokenizer
from ds_sparse_ring.train.packing import pack_lengths
from ds_sparse_ring.train.pretrain import PretrainArguments, Pretraining
from ds_sparse_ring.train.rows import load_prepared, open_rows, packed_dataset
from tests.unit.parity_model import Row, make_batch, tiny_model, word_tokenizer

from .reference import bound


class Wrong(NamedTuple):
    """Something that a user does, and what the message must hold."""

    name: str
    do: Callable[[Path], Any]
    where: str
    what: str
    way_out: str


def section(**values: Any) -> SparseRingConfig:
    return SparseRingConfig.from_deepspeed({"sparse_ring": values})


def written(path: Path, text: str | bytes, name: str = "file.json") -> Path:
    (path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return path / name


def file(text: str | bytes) -> Callable[[Path], Any]:
    return lambda path: SparseRingConfig.from_deepspeed(written(path, text))


def ring(**values: Any) -> SparseRing:
    return SparseRing(SparseRingConfig(backend="torch", segment_tokens=128, **values))


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
    Wrong("a length in words", lambda _: parse_tokens("many"), "plan", "'many'", "write 131072, 128K or 1M"),
    Wrong("an endless sequence", lambda _: parse_tokens("inf"), "plan", "'inf'", "write 131072, 128K or 1M"),
    Wrong(
        "more columns than there is",
        lambda _: read_job(None, "qwen2.5-3b", 64, 1, "h200", 0.1, 0.5), "plan", "columns 0.5", "needs 0 <= columns <= density",
    ),
]  # fmt: skip


def of_kind(kind: type, **values: Any) -> Callable[[Path], Any]:
    config = kind(**{"num_attention_heads": 4, "num_key_value_heads": 2, **values})
    return lambda _: check_model(config, SparseRingConfig())


FRESH: dict[str, Any] = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def fresh(values: Any, **options: Any) -> Callable[[Path], Any]:
    text = values if isinstance(values, str) else json.dumps(values)
    return lambda _: load_config(None, text, word_tokenizer(), **{"sequence_tokens": 64, **options})


def saved(text: str, read: Callable[[str], Any] = load_shape) -> Callable[[Path], Any]:
    return lambda path: read(str(written(path, text, "config.json").parent))


def as_model(folder: str) -> Any:
    return load_config(folder, None, word_tokenizer(), sequence_tokens=64)


def half_a_tokenizer(path: Path) -> Any:
    written(path, '{"tokenizer_class": "PreTrainedTokenizerFast"}', "tokenizer_config.json")
    return load_tokenizer(str(path), None)


def with_prompt_tuning(_: Path) -> None:
    peft = pytest.importorskip("peft")
    attach(peft.get_peft_model(tiny_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)), ring())


def with_two_rings(_: Path) -> None:
    model = tiny_model()
    attach(model, ring())
    attach(model, ring())


def with_a_classifier(_: Path) -> None:
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    attach(LlamaForSequenceClassification(config), ring())


def with_reentrant_checkpointing(_: Path) -> None:
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    adopt_gradient_checkpointing(model)


def with_plain_checkpointing(_: Path) -> None:
    owner, model = ring(), tiny_model().train()
    attach(model, owner)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**owner.sequence_batch(make_batch([Row((70,))], 1)))


def train(owner: SparseRing, **arguments: Any) -> Any:
    """A forward pass as a training loop has it."""
    model = tiny_model().train()
    attach(model, owner)
    return model(**{**owner.sequence_batch(make_batch([Row((70,))], 1)), **arguments})


def train_unsharded(_: Path) -> Any:
    model = tiny_model().train()
    attach(model, ring())
    return model(input_ids=torch.ones(1, 8, dtype=torch.int64))


MODELS = [
    Wrong("an architecture that was never compared", of_kind(GemmaConfig), "model_type", '"gemma"', "Use one of llama"),
    Wrong(
        "a sliding window",
        of_kind(MistralConfig, sliding_window=4096), "config.sliding_window", "4096", "set sliding_window = null",
    ),
    Wrong(
        "a window in some layers",
        of_kind(Qwen2Config, use_sliding_window=True, max_window_layers=1),
        "config.layer_types", "sliding", "set use_sliding_window",
    ),
    Wrong(
        "dropout in attention",
        of_kind(LlamaConfig, attention_dropout=0.1), "config.attention_dropout", "0.1", "set it to 0.0",
    ),
    Wrong("a soft cap", of_kind(LlamaConfig, attn_logit_softcapping=30.0), "attn_logit_softcapping", "30.0", "its own attention"),
    Wrong("a model that looks ahead", of_kind(LlamaConfig, is_causal=False), "model", "is_causal = False", "unset"),
    Wrong("frequencies by length", of_kind(LlamaConfig, rope_parameters=DYNAMIC), "rope_type", '"dynamic"', 'use "yarn"'),
    Wrong("no model of Transformers", lambda _: attach(nn.Linear(2, 2), ring()), "model", "Linear", "from_pretrained"),
    Wrong("a classifier", with_a_classifier, "model", "LlamaForSequenceClassification", "AutoModelForCausalLM"),
    Wrong("adapters that add tokens", with_prompt_tuning, 'adapter "default"', "PROMPT_TUNING", "such as LoRA"),
    Wrong("a second ring", with_two_rings, "the model", "attached to another ring", "detach() that attachment first"),
    Wrong("logits of no token", lambda _: enable_tiled_loss(tiny_model(), 0), "tiled loss", "tile_tokens = 0", "give at least 1"),
    Wrong(
        "chunks of no token",
        lambda _: enable_chunked_layers(tiny_model(), 0), "chunked layers", "chunk_tokens = 0", "give at least 1",
    ),
    Wrong(
        "chunks of no layer",
        lambda _: enable_chunked_layers(nn.Linear(2, 2), 8), "chunked layers", "Linear", "leave layer_chunk_tokens out",
    ),
    Wrong("reentrant checkpointing", with_reentrant_checkpointing, "gradient checkpointing", "use_reentrant=True", "pass"),
    Wrong("checkpointing of another kind", with_plain_checkpointing, "gradient checkpointing", "without our context_fn", "call"),
    Wrong("a model that nobody knows", lambda _: load_shape("gpt-5"), "model", "'gpt-5'", "a folder with config.json"),
    Wrong(
        "a configuration without sizes",
        saved('{"hidden_size": 8, "num_attention_heads": 2}'), "config.json", "intermediate_size is missing", "Add them there",
    ),
    Wrong("a size in words", saved('{"hidden_size": "wide"}'), "config.json", 'hidden_size = "wide"', "Llama's config.json"),
    Wrong("no head at all", saved('{"num_attention_heads": 0}'), "config.json", "num_attention_heads = 0", "Add them there"),
    Wrong("sizes of no JSON", saved("{"), "config.json", "is no JSON", "the folder of a saved model"),
    Wrong("sizes in a list", saved("[]"), "config.json", "holds list", "the folder of a saved model"),
    Wrong(
        "neither model nor sizes",
        lambda _: load_config(None, None, word_tokenizer(), sequence_tokens=64), "--model", "None", "give either",
    ),
    Wrong("sizes in a file that is not there", fresh("no.json"), "--fresh_config", "no.json", "the path of a file"),
    Wrong("sizes in single quotes", fresh("{'model_type': 'llama'}"), "--fresh_config", "is no JSON", "in double quotes"),
    Wrong("sizes without an object", fresh("[]"), "--fresh_config", "holds list", "between braces"),
    Wrong("sizes without an architecture", fresh({"hidden_size": 8}), "--fresh_config", "model_type", 'for example "llama"'),
    Wrong("an unknown architecture", fresh({"model_type": "lama"}), "--fresh_config", '"lama"', "use one of llama"),
    Wrong(
        "a width in quotes",
        fresh({**FRESH, "hidden_size": "32"}), "--fresh_config", "hidden_size", "Give sizes as in the config.json",
    ),
    Wrong("heads that do not divide the width", fresh({**FRESH, "hidden_size": 31}), "--fresh_config", "31", "Give sizes as in"),
    Wrong(
        "fewer words than the tokenizer",
        fresh({**FRESH, "vocab_size": 9}), "vocabulary", "of 9, the tokenizer of 64", "give --tokenizer",
    ),
    Wrong("nothing to stretch", fresh(FRESH, yarn_from=64), "YaRN", "64 tokens to 64", "give --yarn_from fewer"),
    Wrong("a folder without a model", lambda path: as_model(str(path)), "--model", "has no config.json", "give a folder"),
    Wrong(
        "a folder with half a model",
        saved('{"model_type": "llama", ', as_model), "config.json", "Transformers refuses", "Save the model again",
    ),
    Wrong("no tokenizer", lambda path: load_tokenizer(None, str(path)), "no tokenizer in", "test_", "give --tokenizer a folder"),
    Wrong("half a tokenizer", half_a_tokenizer, "tokenizer", "cannot load", "Save it again"),
    Wrong("a KV cache", lambda _: train(ring(), use_cache=True), "sharded sequence", "KV cache", "without use_cache"),
    Wrong(
        "a mask again",
        lambda _: train(ring(), attention_mask=torch.ones(1, 128)), "sharded sequence", "attention_mask", "sequence_batch",
    ),
    Wrong(
        "an entry of another kind",
        lambda _: train(ring(), sparse_ring={}), "sparse_ring entry", "is a dict", "call the model with the batch",
    ),
    Wrong("attention weights", lambda _: train(ring(), output_attentions=True), "attention", "output_attentions", "Remove them"),
    Wrong("whole rows in training", train_unsharded, "batch", "without a sparse_ring entry", "wrap the data collator"),
]  # fmt: skip


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


def on_other_ranks(path: Path) -> None:
    StepShape(8, 8, 1).save(path)
    StepShape(4, 4, 1).check(path, {})


def of_a_stream(path: Path) -> None:
    run: Any = Pretraining.__new__(Pretraining)
    (path / "checkpoints").mkdir()
    written(path / "checkpoints", "step3", "latest")
    run.args, run.ring, run.stream = PretrainArguments("ds.json", output=str(path)), ring(), None
    loaded = ("step3", {"step": 3, "stream": {}})
    run.engine = SimpleNamespace(config={}, load_checkpoint=lambda folder: loaded)
    run.resume()


def with_other_steps(path: Path) -> None:
    StepShape(4, 4, 2).save(path)
    StepShape(4, 4, 1).check(path, {})


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
    Wrong("a checkpoint of a stream", of_a_stream, "resume", "written with --streaming", "go on as it began"),
    Wrong("a checkpoint of other ranks", on_other_ranks, "resume", "written by 8 ranks, here are 4", "start as many"),
    Wrong("a checkpoint of other steps", with_other_steps, "resume", "2 rows a step", "change accumulation steps"),
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

ALL = {"configuration": CONFIGURATIONS, "model": MODELS, "input": INPUTS}


@pytest.mark.parametrize(
    "wrong", [pytest.param(wrong, id=f"{kind}: {wrong.name}") for kind, all_ in ALL.items() for wrong in all_]
)
def test_a_message_says_what_where_and_the_way_out(wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_sparse_ring.disk._async_io", lambda: None)  # is not built here
    with pytest.raises(SparseRingError) as refusal:
        wrong.do(tmp_path)
    message = str(refusal.value)
    for part in (wrong.where, wrong.what, wrong.way_out):
        assert part in message, f"{part!r} is missing: {message}"
    assert "pydantic" not in message and "Traceback" not in message
    assert len(message) < 1200, "a message, not a dump"


def test_the_tables_are_long_and_no_case_stands_twice() -> None:
    assert sum(map(len, ALL.values())) >= 60 and all(len(cases) >= 20 for cases in ALL.values())
    for cases in ALL.values():
        assert len({case.name for case in cases}) == len(cases)
