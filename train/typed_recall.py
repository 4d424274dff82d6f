"""Does retrieval survive sparsity? Typed recall: a small model, trained on two CPU ranks, that must find one far token.

A document is Python source as bytes, with facts "key value" scattered over its first half: 16 keys, each with 16 values of its
own, so that chance is 1/16. Later a key stands alone, and the model must name its value. Half of the keys are asked *in the
middle* (after the first half), the other half *at the tail* (last 64 tokens), each once: a selection that only looks at what
the last queries read has not seen what the middle needs. Attention mass and loss hide that; this task does not.

    python train/typed_recall.py                       # 10 to 15 minutes on two cores

All variants continue from one model that was trained dense on short documents; each trains and is evaluated at full length
under its own selection. The table gives recall at the tail and in the middle, and the density that was really used.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from ds_sparse_ring.config import FullSelector, PriceSelector, Selector, SparseRingConfig, TopPSelector
from ds_sparse_ring.integrations.transformers import attach
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.train.data import IGNORED, standard_library_documents

KEYS, VALUES, BYTES = 16, 16, 256
VOCAB_SIZE = BYTES + KEYS + KEYS * VALUES
TAIL_TOKENS = 64
MUON_RATE, ADAMW_RATE = 0.02, 5e-3
AIM = 0.95
"""Share of dense recall that a sparse variant should reach, at the tail and in the middle."""


@dataclass(frozen=True)
class Stage:
    """Training at one length: ``batch`` documents of ``tokens`` tokens a step."""

    tokens: int
    batch: int
    steps: int


@dataclass(frozen=True)
class Variant:
    """A line of the table."""

    name: str
    selector: Selector
    segment_tokens: int | None


@dataclass(frozen=True)
class Result:
    """What a variant reaches at full length."""

    name: str
    density: float
    tail: float
    middle: float
    loss: float
    seconds: float


WARMUP = (Stage(64, 32, 120), Stage(256, 12, 60))
# What keeps about half of the triangle at 1024 tokens once a model is trained under it.
HALF_PRICE, HALF_P = 3e-4, 0.15
VARIANTS = (
    Variant("dense", FullSelector(), None),
    Variant("price, segments of 64", PriceSelector(price=HALF_PRICE), 64),
    Variant("price, segments of 128", PriceSelector(price=HALF_PRICE), 128),
    Variant("price, segments of 256", PriceSelector(price=HALF_PRICE), 256),
    Variant("price, one probe", PriceSelector(price=HALF_PRICE), None),
    Variant("top-p, one probe (MTraining)", TopPSelector(p=HALF_P), None),
)


@dataclass(frozen=True)
class Questions:
    """A batch of documents.

    Attributes:
        input_ids, labels: ``[B, T]``; a label stands one token behind the key that asks, as for any causal model.
        middle: bool ``[B, T]``, labels that are asked in the middle; all others are at the tail.
    """

    input_ids: Tensor
    labels: Tensor
    middle: Tensor


def python_source() -> np.ndarray:
    """The haystack: about 4 MB of the standard library, as bytes."""
    return np.frombuffer("".join(standard_library_documents())[:4_000_000].encode(), dtype=np.uint8)


class Task:
    """Makes documents; the same seed gives the same documents on every rank."""

    def __init__(self, haystack: np.ndarray, seed: int) -> None:
        self._haystack = haystack
        self._random = np.random.default_rng(seed)

    def questions(self, batch: int, tokens: int) -> Questions:
        """``batch`` documents of ``tokens`` tokens (at least 64)."""
        input_ids = np.empty((batch, tokens), dtype=np.int64)
        labels = np.full_like(input_ids, IGNORED)
        middle = np.zeros(input_ids.shape, dtype=bool)
        for row in range(batch):
            self._fill(input_ids[row], labels[row], middle[row])
        return Questions(torch.from_numpy(input_ids), torch.from_numpy(labels), torch.from_numpy(middle))

    def _fill(self, ids: np.ndarray, labels: np.ndarray, middle: np.ndarray) -> None:
        random, tokens = self._random, len(ids)
        half, tail = tokens // 2, tokens - min(TAIL_TOKENS, tokens // 4)
        begin = random.integers(len(self._haystack) - tokens)
        ids[:] = self._haystack[begin : begin + tokens]
        keys, chosen = random.permutation(KEYS), random.integers(VALUES, size=KEYS)
        values = BYTES + KEYS + keys * VALUES + chosen
        facts = 2 * random.choice(half // 2, KEYS, replace=False)
        ids[facts], ids[facts + 1] = BYTES + keys, values
        # the last token is never asked: its label would stand outside the document
        in_middle = half + random.choice(tail - half, KEYS // 2, replace=False)
        at_tail = tail + random.choice(tokens - 1 - tail, KEYS - KEYS // 2, replace=False)
        asked = np.concatenate([in_middle, at_tail])
        ids[asked], labels[asked + 1] = BYTES + keys, values
        middle[in_middle + 1] = True


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz iteration (Jordan et al., 2024), for hidden matrices.

    torch.optim.Muon does the same in bf16, which many CPUs run a hundred times slower than this fp32.
    """

    def __init__(self, parameters: Sequence[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients at hand."""
        for group in self.param_groups:
            for parameter in group["params"]:
                buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                buffer.mul_(group["momentum"]).add_(parameter.grad)
                update = _orthogonalised(parameter.grad + group["momentum"] * buffer)
                rows, columns = parameter.shape
                parameter.add_(update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def _orthogonalised(x: Tensor) -> Tensor:
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


class Learner:
    """A model attached to a ring of all ranks, its optimizers, and one step of training or evaluation."""

    def __init__(self, config: SparseRingConfig, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=128,
                intermediate_size=384,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=4096,
                rope_parameters={"rope_type": "default", "rope_theta": 1e5},
                use_cache=False,
            )
        )
        self.ring = SparseRing(config)
        self.ring.meter.active = False
        attach(self.model, self.ring)
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "layers" in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "layers" not in name]
        self.optimizers = (
            (Muon(matrices, lr=MUON_RATE), MUON_RATE),
            (torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0), ADAMW_RATE),
        )

    def step(self, questions: Questions, rate: float) -> float:
        """Train on a batch at ``rate`` times the optimizers' rates; returns the mean loss."""
        batch = self.ring.sequence_batch({"input_ids": questions.input_ids, "labels": questions.labels})
        targets = batch.pop("shift_labels")
        batch.pop("labels")
        count = self.ring.count_targets([{"shift_labels": targets}])
        logits = self.model(**batch).logits
        # a sum even where this rank holds no target: its gradient is then an exact zero
        loss = cross_entropy(logits[0], targets[0], ignore_index=IGNORED, reduction="sum") / count
        loss.backward()
        for optimizer, base_rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * base_rate
                for parameter in group["params"]:
                    self.ring.axes.world_sum(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        return float(self.ring.axes.world_sum(loss.detach().clone()))

    def train(self, task: Task, stages: tuple[Stage, ...], report: Any) -> float:
        """All stages, the rate falling to zero over the last 40 % of the steps; returns the last loss."""
        total, done, loss = sum(stage.steps for stage in stages), 0, 0.0
        for stage in stages:
            for step in range(1, stage.steps + 1):
                rate = min(1.0, (done + 1) / 20, (total - done) / (0.4 * total))
                loss = self.step(task.questions(stage.batch, stage.tokens), rate)
                done += 1
                if step % 25 == 0 or step == stage.steps:
                    report(f"  {stage.tokens:5} tokens  step {step:4} of {stage.steps}  loss {loss:.3f}")
        return loss

    @torch.no_grad()
    def evaluate(self, task: Task, batch: int, tokens: int, batches: int) -> tuple[float, float, float]:
        """(density, tail recall, middle recall) over ``batches`` fresh batches."""
        self.ring.meter.active = True
        right, asked = torch.zeros(2), torch.zeros(2)
        for _ in range(batches):
            questions = task.questions(batch, tokens)
            local = self.ring.sequence_batch({"input_ids": questions.input_ids})
            guesses = self.model(**local).logits.argmax(-1)
            guesses = self.ring.gather(guesses, local["sparse_ring"])
            # the guess at the key's place, its label one behind
            correct = guesses[:, :-1] == questions.labels[:, 1:]
            for place, chosen in enumerate((~questions.middle, questions.middle)):
                chosen = (chosen & (questions.labels != IGNORED))[:, 1:]
                right[place] += (correct & chosen).sum()
                asked[place] += chosen.sum()
        density = self.ring.meter.pop()["density"]
        self.ring.meter.active = False
        tail, middle = (right / asked).tolist()
        return density, tail, middle


def run(rank: int, world: int, args: argparse.Namespace, store: str) -> None:
    """One rank's whole work; rank 0 prints and writes."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)

    def report(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    report("Training dense on short documents, once for all variants")
    haystack = python_source()
    start = Learner(SparseRingConfig(selector=FullSelector()), args.seed)
    start.train(Task(haystack, args.seed), WARMUP, report)
    results = []
    for variant in args.variants:
        report(f"{variant.name}: training at {args.tokens} tokens")
        results.append(train_variant(variant, start, haystack, args, report))
        report(f"  {results[-1]}")
    if rank == 0:
        finish(results, args)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def train_variant(variant: Variant, start: Learner, haystack: np.ndarray, args: argparse.Namespace, report: Any) -> Result:
    """Continue from ``start`` at full length under the variant's selection, then evaluate under it."""
    began = time.monotonic()
    learner = Learner(SparseRingConfig(selector=variant.selector, segment_tokens=variant.segment_tokens), args.seed)
    learner.model.load_state_dict(start.model.state_dict())
    loss = learner.train(Task(haystack, args.seed + 1), (Stage(args.tokens, args.batch, args.steps),), report)
    density, tail, middle = learner.evaluate(Task(haystack, args.seed + 2), args.batch, args.tokens, args.evaluation_batches)
    return Result(variant.name, density, tail, middle, loss, time.monotonic() - began)


def markdown(results: list[Result]) -> str:
    """The table; shares are of the first line, which is dense."""
    lines = ["| selection | density | recall at the tail | in the middle | loss |", "|---|---|---|---|---|"]
    dense = results[0]
    for result in results:
        tail = f"{result.tail:.3f} ({result.tail / dense.tail:.0%} of dense)"
        middle = f"{result.middle:.3f} ({result.middle / dense.middle:.0%})"
        lines.append(f"| {result.name} | {result.density:.2f} | {tail} | {middle} | {result.loss:.3f} |")
    return "\n".join(lines)


def finish(results: list[Result], args: argparse.Namespace) -> None:
    """Print the table, write it and the numbers."""
    table = markdown(results)
    dense = results[0]
    reached = [r.name for r in results[1:] if r.tail >= AIM * dense.tail and r.middle >= AIM * dense.middle]
    sentence = f"At least {AIM:.0%} of dense at the tail and in the middle: {', '.join(reached) or 'none'}"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "table.md").write_text(f"{table}\n\n{sentence}\n")
    about = {"tokens": args.tokens, "ranks": args.ranks, "steps": args.steps, "batch": args.batch, "seed": args.seed}
    (args.output / "table.json").write_text(json.dumps({**about, "results": [asdict(r) for r in results]}, indent=1))
    print(f"\n{table}\n\n{sentence}\nWritten: {args.output}/table.md, table.json", flush=True)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description="Typed recall: retrieval under sparse attention, on CPU ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4, help="documents a step at full length")
    parser.add_argument("--steps", type=int, default=80, help="at full length, per variant")
    parser.add_argument("--evaluation_batches", type=int, default=32)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="variants whose name holds one; dense always runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/typed_recall"))
    args = parser.parse_args()
    words = args.only if args.only is not None else [""]
    args.variants = [v for v in VARIANTS if v.name == "dense" or any(word in v.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args.ranks, args, f"{folder}/store"), nprocs=args.ranks)


if __name__ == "__main__":
    main()
    sys.exit(0)
