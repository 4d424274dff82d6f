"""Set-ups for long contexts: a model, a length, a number of GPUs, and the DeepSpeed file that fits them.

The files beside this one are made from `RECIPES`: ``python -m ds_sparse_ring.train.recipes`` writes them anew, with README.md.
A file holds nothing that the command line knows better; see the commands there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.ds_configs import path as shipped
from ds_sparse_ring.ds_json import load_ds_json
from ds_sparse_ring.hardware import Hardware, load_hardware
from ds_sparse_ring.job import SHAPES, Job, Schedule, states_of

FOLDER = Path(__file__).parent
NODE_HOST_GIB = 1904
"""Host memory that a job may take of a node with 2 TB, whose GPUs it does not share."""

DENSITY = 0.05
"""Active share of the causal pairs that is held; where every query chooses all of it are columns."""

SEGMENTS = 512
"""Of a sequence: shorter ones keep less that only some of their queries want, and have more columns."""

LOSS_TILE_TOKENS = 4096


@dataclass(frozen=True)
class Recipe:
    """One set-up.

    Attributes:
        model: a shape that ``ds-sparse-ring plan`` knows. repository: its name on the Hugging Face hub.
        tokens: of a sequence. gpus: H200, in nodes of eight with 2 TB. yarn_from: tokens that YaRN stretches to ``tokens``.
        ring: what the section ``"sparse_ring"`` says besides segments and chunks of layers. states_on_host: weights and
            optimizer, with DeepSpeed's CPU Adam.
    """

    model: str
    repository: str
    tokens: int
    gpus: int
    yarn_from: int
    ring: dict[str, Any] = field(default_factory=dict)
    states_on_host: bool = False

    @property
    def length(self) -> str:
        """Tokens as a name has them."""
        return f"{self.tokens >> 20}m" if self.tokens >= 1 << 20 else f"{self.tokens >> 10}k"

    @property
    def name(self) -> str:
        """Also that of its file."""
        return f"{self.model}-{self.length}-{self.gpus}gpu"

    @property
    def path(self) -> Path:
        """The DeepSpeed file."""
        return FOLDER / f"{self.name}.json"

    def config(self) -> dict[str, Any]:
        """What stands in it."""
        config = load_ds_json(shipped("zero3_cpu_offload" if self.states_on_host else "zero3"))
        planned = {
            "segment_tokens": self.tokens // SEGMENTS,
            "schedule": {"target_density": DENSITY},
            "layer_chunk_tokens": 16384,
        }
        config["sparse_ring"] |= planned | self.ring
        return config

    def hardware(self) -> Hardware:
        """H200s that share the host memory of their nodes among the job's ranks."""
        return load_hardware("h200").model_copy(update={"host_gib": NODE_HOST_GIB / min(self.gpus, 8)})

    def job(self) -> Job:
        """For the simulator and the count of bytes."""
        config = self.config()
        section = SparseRingConfig(**config["sparse_ring"])
        return Job(
            SHAPES[self.model],
            self.hardware(),
            section,
            self.tokens,
            self.gpus,
            density=DENSITY,
            columns=DENSITY,
            loss_tile=LOSS_TILE_TOKENS,
            **states_of(config),
        )

    def schedule(self) -> Schedule:
        """Who exchanges what with whom, as the file says."""
        config = SparseRingConfig(**self.config()["sparse_ring"])
        return Schedule(config.ulysses_degree, config.inner_degree, config.inner)

    def command(self) -> str:
        """What starts it; text is prepared before."""
        where = f"--num_gpus {self.gpus}" if self.gpus <= 8 else "--hostfile hosts"
        folder = self.repository.split("/")[1]
        return (
            f"deepspeed {where} train/pretrain.py --deepspeed train/recipes/{self.name}.json --model {folder}/ "
            f"--yarn_from {self.yarn_from} --data data/ --bf16 --loss_tile_tokens {LOSS_TILE_TOKENS} --learning_rate 1e-5"
        )


_UNITED_NODES: dict[str, Any] = {"ulysses_degree": 2, "inner_degree": 4}
_HEADS_HALVED: dict[str, Any] = {"ulysses_degree": 2}  # half the columns, twice the queries that read each
_HEADS_SHARED: dict[str, Any] = {"ulysses_degree": 8}  # each rank needs the columns of one of 8 KV heads


def _host(gib: float) -> dict[str, Any]:
    return {"offload": {"host_gib": gib}}


_QWEN3B = ("qwen2.5-3b", "Qwen/Qwen2.5-3B")
_LLAMA = ("llama-3.1-8b", "meta-llama/Llama-3.1-8B")
_QWEN8B = ("qwen3-8b", "Qwen/Qwen3-8B")

RECIPES = (
    Recipe(*_QWEN3B, 512 << 10, 1, 32768, _host(160)),
    Recipe(*_QWEN3B, 512 << 10, 2, 32768, _HEADS_HALVED),
    Recipe(*_QWEN3B, 512 << 10, 8, 32768, _HEADS_HALVED),
    Recipe(*_QWEN3B, 512 << 10, 32, 32768, _UNITED_NODES),
    Recipe(*_LLAMA, 512 << 10, 1, 8192, _host(280), states_on_host=True),
    Recipe(*_LLAMA, 512 << 10, 2, 8192, {**_HEADS_HALVED, **_host(140)}),
    Recipe(*_LLAMA, 512 << 10, 8, 8192, _HEADS_SHARED),
    Recipe(*_LLAMA, 512 << 10, 32, 8192, _HEADS_SHARED),
    Recipe(*_LLAMA, 1 << 20, 1, 8192, {"segment_tokens": 4096, **_host(560)}, states_on_host=True),
    Recipe(*_LLAMA, 1 << 20, 2, 8192, {**_HEADS_HALVED, **_host(280)}, states_on_host=True),
    Recipe(*_LLAMA, 1 << 20, 8, 8192, {**_HEADS_SHARED, **_host(80)}),
    Recipe(*_LLAMA, 1 << 20, 32, 8192, _HEADS_SHARED),
    Recipe(*_QWEN8B, 512 << 10, 1, 32768, _host(320), states_on_host=True),
    Recipe(*_QWEN8B, 512 << 10, 2, 32768, {**_HEADS_HALVED, **_host(160)}),
    Recipe(*_QWEN8B, 512 << 10, 8, 32768, _HEADS_SHARED),
    Recipe(*_QWEN8B, 512 << 10, 32, 32768, _HEADS_SHARED),
)
"""All set-ups."""


def text_of(recipe: Recipe) -> str:
    """The DeepSpeed file as it is written."""
    return json.dumps(recipe.config(), indent=2) + "\n"
