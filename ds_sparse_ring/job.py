"""What is to be trained on what: sizes of a model, machine, configuration, and who exchanges what with whom."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.config_errors import list_problems
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.hardware import Hardware
from ds_sparse_ring.plan import InnerKind

StatesOn = Literal["device", "host", "disk"]


class ModelShape(BaseModel):
    """The sizes of a decoder, by the names of Transformers' configurations.

    Without ``num_key_value_heads`` every query head has keys and values of its own.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    vocab_size: PositiveInt
    head_dim: PositiveInt | None = None
    tie_word_embeddings: bool = False

    @model_validator(mode="before")
    @classmethod
    def _own_heads(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("num_key_value_heads") is None and "num_attention_heads" in values:
            return {**values, "num_key_value_heads": values["num_attention_heads"]}
        return values

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> ModelShape:
        """From a model's configuration; ``where`` names it in messages.

        Raises:
            SparseRingError: a size is missing or no number.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise SparseRingError(
                f"model: the sizes of a decoder cannot be read from {where}: {list_problems(error)}. Add them there, by the "
                "names of Llama's config.json"
            ) from None

    @property
    def head_size(self) -> int:
        """D."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def layer_parameters(self) -> int:
        """Of the matrix products of all layers."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        per_layer = self.hidden_size * (heads * self.head_size + 3 * self.intermediate_size)
        return self.num_hidden_layers * per_layer

    @property
    def parameters(self) -> int:
        """All, embeddings included."""
        return self.layer_parameters + self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)


def _shape(width: int, inner: int, layers: int, heads: int, kv_heads: int, words: int, tied: bool = False) -> ModelShape:
    return ModelShape(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=words, head_dim=128, tie_word_embeddings=tied,
    )  # fmt: skip


SHAPES = {
    "qwen2.5-3b": _shape(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _shape(3584, 18944, 28, 28, 4, 152064),
    "llama-3.1-8b": _shape(4096, 14336, 32, 32, 8, 128256),
    "qwen3-8b": _shape(4096, 12288, 36, 32, 8, 151936),
    "qwen2.5-32b": _shape(5120, 27648, 64, 40, 8, 152064),
    "llama-3.1-70b": _shape(8192, 28672, 80, 64, 8, 128256),
}


def load_shape(name: str) -> ModelShape:
    """A named shape, or that of a folder with ``config.json``.

    Raises:
        SparseRingError: neither, or a file that does not say what sizes the model has.
    """
    if name in SHAPES:
        return SHAPES[name]
    file = Path(name) / "config.json"
    if not file.is_file():
        raise SparseRingError(f"model: {name!r} is neither a folder with config.json nor one of {', '.join(SHAPES)}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SparseRingError(f"model: {file} is no JSON ({error}): give the folder of a saved model") from None
    if not isinstance(values, dict):
        raise SparseRingError(f"model: {file} holds {type(values).__name__}, not an object: give the folder of a saved model")
    return ModelShape.of(values, str(file))


@dataclass(frozen=True)
class Job:
    """What is to be trained on what.

    Attributes:
        tokens: of a sequence. world: GPUs. density: active share of the causal pairs (1 for the full index); columns: share of
            all causal pairs that are columns. zero_stage: 0 to 3. loss_tile: tokens whose logits exist at once.
        optimizer_on, weights_on: where DeepSpeed keeps these states. trained_share: of the weights; the others are frozen.
        optimizer_bytes: of a trained weight; 12 are a master copy in fp32 and two moments of Adam.
        liger: norms, rotary embedding and gates by Liger's kernels.
    """

    model: ModelShape
    hardware: Hardware
    config: SparseRingConfig
    tokens: int
    world: int
    density: float
    columns: float
    zero_stage: int = 3
    loss_tile: int = 4096
    optimizer_on: StatesOn = "device"
    weights_on: StatesOn = "device"
    trained_share: float = 1.0
    optimizer_bytes: int = 12
    liger: bool = False


class Schedule(NamedTuple):
    """Who exchanges what with whom: the configuration's ``ulysses_degree``, ``inner_degree`` and ``inner``."""

    ulysses: int = 1
    inner: int | None = None
    kind: InnerKind = "ring"

    def name(self, size: int) -> str:
        """As a table shows it; ``size``: ranks that share a sequence."""
        ring = size // self.ulysses
        inner = ring if self.inner is None else self.inner
        parts = [f"Ulysses {self.ulysses}"] * (self.ulysses > 1)
        if self.kind == "gather":
            parts += [f"ring of {ring // inner}"] * (inner < ring) + [f"gather of {inner}"]
        else:
            parts += [f"ring of {ring}" if self.inner is None else f"ring of {ring // inner} x {inner}"]
        return " x ".join(parts)


def configured(job: Job) -> Schedule | None:
    """The schedule that the configuration names; None if it names none."""
    config = job.config
    if not config.model_fields_set & {"ulysses_degree", "inner_degree", "inner"}:
        return None
    return Schedule(config.ulysses_degree, config.inner_degree, config.inner)


def schedules(job: Job) -> list[Schedule]:
    """What the job's ranks and heads allow: flat rings, inner rings of a node, and all of a node's shards gathered at once.

    The one that the configuration names is among them.

    Raises:
        SparseRingError: that one is impossible, naming what would be possible.
    """
    size, own = job.config.check_degree(job.world), configured(job)
    job.config.check_heads(job.model.num_attention_heads, job.model.num_key_value_heads)
    found = [] if own is None else [own]
    for ulysses in (n for n in range(1, size + 1) if size % n == 0 and n <= job.hardware.node_ranks):
        try:
            job.config.model_copy(update={"ulysses_degree": ulysses}).check_heads(
                job.model.num_attention_heads, job.model.num_key_value_heads
            )
        except SparseRingError:
            continue
        ring, within = size // ulysses, job.hardware.node_ranks // ulysses
        found.append(Schedule(ulysses))
        if 1 < within < ring and ring % within == 0:
            found.append(Schedule(ulysses, within))
        if (gathered := min(within, ring)) > 1 and ring % gathered == 0:
            found.append(Schedule(ulysses, gathered, "gather"))
    return list(dict.fromkeys(found))


def states_of(ds: Mapping[str, Any]) -> dict[str, Any]:
    """``zero_stage``, ``optimizer_on`` and ``weights_on`` of a `Job`, from a DeepSpeed configuration.

    Raises:
        SparseRingError: a section that is no object, or a stage that DeepSpeed has not.
    """
    zero = _object(ds, "zero_optimization", "")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise SparseRingError(f"zero_optimization.stage = {json.dumps(stage)}: use 0, 1, 2 or 3")

    def place(section: str) -> StatesOn:
        device = _object(zero, section, "zero_optimization.").get("device", "none")
        return {"cpu": "host", "nvme": "disk"}.get(device, "device")  # type: ignore[return-value]

    return {
        "zero_stage": int(stage),
        "optimizer_on": place("offload_optimizer"),
        "weights_on": place("offload_param"),
    }


def _object(values: Mapping[str, Any], key: str, path: str) -> Mapping[str, Any]:
    found = values.get(key) or {}
    if not isinstance(found, Mapping):
        raise SparseRingError(f"{path}{key} = {json.dumps(found)} is no object: write DeepSpeed's settings between braces")
    return found
