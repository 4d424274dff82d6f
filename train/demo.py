"""The whole line in a few minutes on two CPU processes: text, tokenizer, training, evaluation, checkpoint, picture.

    make demo            # or: python train/demo.py

The `deepspeed` launcher starts train/pretrain.py, which is what one would run for a real model; this script prepares what it
reads, shows what it writes to metrics.jsonl, and looks at the checkpoint afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch.utils.cpp_extension import get_default_build_root
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.ds_json import load_ds_json
from ds_sparse_ring.inspect_run import write_page
from ds_sparse_ring.plots import HeadMap, head_map, save_training_report
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.select import select_index
from ds_sparse_ring.train.data import standard_library_documents, tokenize_documents, train_tokenizer
from ds_sparse_ring.train.selection_table import capture

REPOSITORY = Path(__file__).resolve().parent.parent
PROCESSES = 2
SEQUENCE_TOKENS = 4096
EVALUATION_SEQUENCES = 4
TEXT_CHARACTERS = 4_000_000
DOCUMENT_CHARACTERS = (8_000, 200_000)
VOCAB_SIZE = 1024
MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "tie_word_embeddings": True,
    "initializer_range": 0.06,  # 0.02 is for wide models; a narrow one would learn nothing in its first minutes
}
# A model this young spreads its attention widely: 5e-4 per key is twice the uniform share at 4096 tokens.
SPARSE_RING = {"selector": {"kind": "price", "price": 5e-4}, "segment_tokens": 512, "log_steps": 5, "maps": {"every": 8}}
STALE_LOCK_S = 900

# Runs in a process of its own that never imports this package.
GENERATE = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
torch.manual_seed(0)
ids = tokenizer(prompt, return_tensors="pt")
out = model.generate(**ids, max_new_tokens=48, do_sample=True, top_k=10, temperature=0.7, pad_token_id=tokenizer.pad_token_id)
assert "ds_sparse_ring" not in sys.modules
print(tokenizer.decode(out[0], skip_special_tokens=True))
"""


@dataclass(frozen=True)
class Files:
    """Where the demo keeps things."""

    folder: Path

    @property
    def text(self) -> Path:
        """One document per file."""
        return self.folder / "text"

    @property
    def tokenizer(self) -> Path:
        """For AutoTokenizer."""
        return self.folder / "tokenizer"

    @property
    def deepspeed(self) -> Path:
        """DeepSpeed JSON."""
        return self.folder / "zero3.json"

    @property
    def output(self) -> Path:
        """What the training script writes."""
        return self.folder / "output"

    @property
    def log(self) -> Path:
        """What the processes print."""
        return self.folder / "train.log"


def prepare(files: Files, steps: int) -> None:
    """Write text, tokenizer and DeepSpeed configuration; what an earlier demo left is removed.

    Raises:
        SystemExit: the folder holds something else, which is left alone.
    """
    if files.folder.exists() and any(files.folder.iterdir()) and not files.deepspeed.exists():
        raise SystemExit(f"{files.folder} is not empty and not from an earlier demo: give another --folder")
    shutil.rmtree(files.folder, ignore_errors=True)
    files.text.mkdir(parents=True)
    shortest, longest = DOCUMENT_CHARACTERS
    documents = [text[:longest] for text in standard_library_documents() if len(text) >= shortest]
    written = 0
    for number in np.random.default_rng(0).permutation(len(documents)):
        if written < TEXT_CHARACTERS:
            (files.text / f"{number:03}.txt").write_text(documents[number], encoding="utf-8")
            written += len(documents[number])
    train_tokenizer(
        (path.read_text(encoding="utf-8") for path in sorted(files.text.iterdir())), files.tokenizer, vocab_size=VOCAB_SIZE
    )
    config = load_ds_json(REPOSITORY / "ds_configs" / "zero3.json")
    config["sparse_ring"] |= {**SPARSE_RING, "dense_warmup_steps": steps // 4}
    files.deepspeed.write_text(json.dumps(config, indent=2))


def launch(files: Files, steps: int) -> subprocess.Popen[bytes]:
    """Start the `deepspeed` launcher with two CPU processes."""
    beside_python = Path(sys.executable).parent
    options = {
        "--deepspeed": files.deepspeed,
        "--text": files.text,
        "--tokenizer": files.tokenizer,
        "--fresh_config": json.dumps(MODEL),
        "--sequence_tokens": SEQUENCE_TOKENS,
        "--steps": steps,
        "--evaluation_sequences": EVALUATION_SEQUENCES,
        "--output": files.output,
        "--learning_rate": 5e-3,
        "--warmup_steps": 10,
    }
    launcher = [beside_python / "deepspeed", "--num_accelerators", PROCESSES, "--master_port", _free_port()]
    command = [*launcher, REPOSITORY / "train" / "pretrain.py", *(part for pair in options.items() for part in pair)]
    # one thread per process: two processes share a small machine; ninja, which builds the op, lies beside python
    path = f"{beside_python}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path}
    with open(files.log, "wb") as log:
        return subprocess.Popen([str(part) for part in command], env=environment, stdout=log, stderr=log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def follow(path: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any] | None]:
    """Lines of a growing JSON-lines file until the process has ended; None about twice a second while there is none."""
    position = 0
    ended = False
    while not ended:
        ended = process.poll() is not None  # asked before reading, so that the last lines are not missed
        if path.exists():
            with open(path, encoding="utf-8") as file:
                file.seek(position)
                while (line := file.readline()).endswith("\n"):
                    position = file.tell()
                    yield json.loads(line)
        if not ended:
            yield None
            time.sleep(0.5)


def watch(files: Files, process: subprocess.Popen[bytes], steps: int, hint: str, console: Console) -> list[dict[str, Any]]:
    """Show the training's progress; returns its metrics lines.

    Raises:
        SystemExit: the training failed; the end of its log is shown.
    """
    metrics = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        start = progress.add_task(hint, total=None)
        train = progress.add_task("Training", total=steps, start=False, visible=False)
        for line in follow(files.output / "metrics.jsonl", process):
            if line is None:
                continue
            metrics.append(line)
            if line.get("event") == "start":
                progress.update(start, visible=False)
                progress.start_task(train)
                progress.update(train, visible=True)
            elif "event" not in line:
                progress.update(train, completed=line["step"])
            progress.console.print(describe(line), highlight=False, soft_wrap=True)
    if process.returncode:
        console.print(files.log.read_text(errors="replace")[-4000:], markup=False, highlight=False)
        console.print(f"[red]The training failed with exit status {process.returncode}; its log is {files.log}")
        raise SystemExit(1)
    return metrics


def starting_hint() -> str:
    """What the processes do before the first step.

    Raises:
        SystemExit: a build was interrupted; DeepSpeed would wait for its lock for ever.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in root.rglob("lock"):
        if time.time() - lock.stat().st_mtime > STALE_LOCK_S:
            raise SystemExit(f"A build of a DeepSpeed op was interrupted and would be waited for for ever: remove {lock}")
    if next(root.rglob("deepspeed_shm_comm*.so"), None) is None:
        return "DeepSpeed compiles its shared-memory op, once (about 200 s), then the processes start"
    return "Starting two processes: PyTorch, DeepSpeed, tokens of the text (about half a minute)"


def describe(line: dict[str, Any]) -> str:
    """A line of metrics.jsonl for people."""
    event = line.get("event")
    if event == "start":
        return f"Training on {PROCESSES} processes, ZeRO-3, {SEQUENCE_TOKENS} tokens a step, dense first, then sparse"
    if event == "saved":
        return f"saved       {line['path']}"
    figures = f"loss {line['loss']:.3f}"
    if "tokens_per_s" in line:
        figures += f"  {line['tokens_per_s']:6.0f} tokens/s"
    for name in ("density", "recall", "pair_imbalance"):
        if name in line:
            figures += f"  {name.replace('_', ' ')} {line[name]:.3f}"
    return f"{'evaluation' if event else 'step ' + str(line['step']):<10}  {figures}"


def most_interesting_head(files: Files) -> HeadMap:
    """The head that, under its index, keeps the most mass beyond what a dense head of that density would."""
    torch.set_num_threads(1)  # many small operations: two threads would wait for each other
    model = LlamaForCausalLM.from_pretrained(files.output / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(files.output / "model")
    text = max((path.read_text(encoding="utf-8") for path in files.text.iterdir()), key=len)
    ids = torch.as_tensor(tokenize_documents([text], tokenizer)[0][:SEQUENCE_TOKENS], dtype=torch.int64)[None]
    layers = capture(model, ids, list(range(model.config.num_hidden_layers)))
    ring = SparseRing(SparseRingConfig.from_deepspeed(files.deepspeed))  # one process: a ring of one
    ring.step = ring.config.dense_warmup_steps  # past the steps that use the full index
    context = ring.bind(ring.sequence_batch({"input_ids": ids})["sparse_ring"])
    maps = []
    for layer, (q, k) in layers.items():
        scale = q.shape[-1] ** -0.5
        index = select_index(q, k, context, scale=scale)
        group = q.shape[0] // k.shape[0]
        for head in range(q.shape[0]):
            title = f"layer {layer}, head {head}"
            maps.append(head_map(q[head], k[head // group], index, head=head, scale=scale, title=title))
    return max(maps, key=lambda shown: shown.kept - shown.density)


def generate(files: Files, prompt: str) -> str:
    """Text that plain Transformers generates from the checkpoint, in a process without this package."""
    command = [sys.executable, "-c", GENERATE, str(files.output / "model"), prompt]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"plain Transformers could not use the checkpoint:\n{done.stderr}")
    return done.stdout.rstrip()


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description="Train a small model with sparse ring attention on two CPU processes")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "demo")
    args = parser.parse_args()
    files, console, began = Files(args.folder), Console(), time.monotonic()
    console.print("Preparing: text from Python's standard library, a byte-level BPE tokenizer")
    prepare(files, args.steps)
    console.print(f"Starting the deepspeed launcher with {PROCESSES} CPU processes; they write to {files.log}", soft_wrap=True)
    hint = starting_hint()
    process = launch(files, args.steps)
    try:
        metrics = watch(files, process, args.steps, hint, console)
    finally:
        if process.poll() is None:  # interrupted: the launcher ends its own processes on SIGTERM
            process.terminate()
            process.wait()
    console.print("Plain Transformers continues a line from the checkpoint:")
    console.print(generate(files, "    def __init__(self, "), style="green", markup=False, highlight=False)
    console.print("Drawing: attention of every head, and what its index keeps")
    transformers_logging.disable_progress_bar()  # one bar is enough
    picture = files.folder / "demo.png"
    warmup = SparseRingConfig.from_deepspeed(files.deepspeed).dense_warmup_steps
    save_training_report(picture, metrics, most_interesting_head(files), dense_warmup_steps=warmup)
    console.print(f"Done in {time.monotonic() - began:.0f} s", highlight=False)
    console.print(f"page        {write_page(files.output)}", highlight=False, soft_wrap=True)
    console.print(f"picture     {picture}\ncheckpoint  {files.output / 'model'}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
