"""The model and tokenizer of a training run: from a folder, or fresh from a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.model_checks import MODEL_TYPES

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.gguf")


def load_tokenizer(folder: str | None, model: str | None, data: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in ``folder``; if none is given, beside the model, or else beside prepared data.

    Raises:
        SparseRingError: if there is none, or one that cannot be loaded; a name of the hub.
    """
    source = folder or model or (data and f"{data}/tokenizer")
    for option, name in (("--tokenizer", folder), ("--model", model)):
        _check_folder(option, name)
    if source is None or not (Path(source) / "tokenizer_config.json").is_file():
        raise SparseRingError(
            f"no tokenizer in {source}: give --tokenizer a folder that a tokenizer was saved to (train_tokenizer of "
            "ds_sparse_ring.train.data makes one)"
        )
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise SparseRingError(
            f"tokenizer: Transformers cannot load {source}: {reason}. Save it again by tokenizer.save_pretrained"
        ) from error


def _check_folder(option: str, name: str | None) -> None:
    """Refuse what is no folder here. Every rank would download a name of the hub, and machines of a cluster often cannot."""
    if name is not None and not Path(name).is_dir():
        raise SparseRingError(
            f"{option} {name}: there is no such folder here, and names of the Hugging Face hub are not read: download it first "
            f"(hf download {name} --local-dir FOLDER; older ones: huggingface-cli download), and give that folder"
        )


def load_config(
    model: str | None,
    fresh_config: str | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_tokens: int,
    yarn_from: int = 0,
) -> PreTrainedConfig:
    """The configuration of the model to train.

    Args:
        model: a folder with ``config.json``.
        fresh_config: instead, a JSON object or the path of one, with ``model_type`` and sizes. What it leaves out of vocabulary
            size, special tokens and longest position is taken from the tokenizer and the data.
        sequence_tokens: of a row of training data. yarn_from: if not 0, `set_yarn` from so many tokens to a row's.

    Raises:
        SparseRingError: neither or both are given, what they hold is no model's configuration, or the vocabulary is too small for
            the tokenizer.
    """
    if (model is None) == (fresh_config is None):
        raise SparseRingError(
            f"--model {model} and --fresh_config {fresh_config}: give either --model FOLDER or --fresh_config JSON"
        )
    if fresh_config is not None:
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        known = {"vocab_size": len(tokenizer), "max_position_embeddings": sequence_tokens, **special}
        values = {**known, **_json(fresh_config)}
        if "model_type" not in values:
            raise SparseRingError('--fresh_config needs a "model_type", for example "llama"')
        config = _fresh(values.pop("model_type"), values)
    else:
        config = _of_folder(str(model))
    words = getattr(config, "vocab_size", None)
    if words is None:
        raise SparseRingError(
            f"the model's {type(config).__name__} has no vocab_size: give a causal language model, one of "
            f"{', '.join(MODEL_TYPES)}"
        )
    if words < len(tokenizer):
        raise SparseRingError(
            f"the model has a vocabulary of {words}, the tokenizer of {len(tokenizer)}: they do not belong together; give "
            "--tokenizer the model's own, or resize the model's embeddings"
        )
    if yarn_from:
        set_yarn(config, original_tokens=yarn_from, tokens=sequence_tokens)
    return config


def _fresh(kind: str, values: dict[str, Any]) -> PreTrainedConfig:
    if kind not in MODEL_TYPES:
        raise SparseRingError(f'--fresh_config: model_type "{kind}" is not supported: use one of {", ".join(MODEL_TYPES)}')
    try:
        return AutoConfig.for_model(kind, **values)
    except (StrictDataclassError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise SparseRingError(
            f"--fresh_config: Transformers refuses it: {reason}. Give sizes as in the config.json of a {kind} model"
        ) from None


def _of_folder(folder: str) -> PreTrainedConfig:
    _check_folder("--model", folder)
    if not (Path(folder) / "config.json").is_file():
        raise SparseRingError(f"--model: {folder} has no config.json: give a folder that a model was saved to")
    try:
        return AutoConfig.from_pretrained(folder)
    except (StrictDataclassError, OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise SparseRingError(
            f"--model: Transformers refuses {Path(folder) / 'config.json'}: {reason}. Save the model again, or mend the file"
        ) from None


def set_yarn(config: PreTrainedConfig, *, original_tokens: int, tokens: int) -> None:
    """Stretch a model's rotary positions with YaRN (2309.00071), and make sure that every key of it is there.

    A model with ``llama3`` frequencies keeps their bounds: they count rotations over the original length, as YaRN's do.

    Args:
        config: changed in place: ``rope_parameters`` (type, factor, original length, theta) and ``max_position_embeddings``.
        original_tokens: length that the frequencies were made for. tokens: length to train on.

    Raises:
        SparseRingError: nothing to stretch, or a model that does not read these keys.
    """
    if not 0 < original_tokens < tokens:
        raise SparseRingError(
            f"YaRN: cannot stretch {original_tokens} tokens to {tokens}: give --yarn_from fewer tokens than a row has"
        )
    before = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" not in before:
        raise SparseRingError(
            f"YaRN: {type(config).__name__} has no rope_parameters with one rope_theta for all layers: leave --yarn_from out"
        )
    wanted = {
        "rope_type": "yarn",
        "rope_theta": before["rope_theta"],
        "factor": tokens / original_tokens,
        "original_max_position_embeddings": original_tokens,
    }
    if before.get("rope_type") == "llama3":
        wanted |= {"beta_slow": before["low_freq_factor"], "beta_fast": before["high_freq_factor"]}
    config.rope_parameters = wanted
    config.max_position_embeddings = tokens
    read = AutoConfig.for_model(**config.to_dict())  # as from config.json: a key that is dropped there is lost for users
    kept = {key: read.rope_parameters.get(key) for key in wanted}
    if kept != wanted or read.max_position_embeddings != tokens:
        raise SparseRingError(
            f"YaRN: {type(config).__name__} keeps {kept} and {read.max_position_embeddings} of {wanted} and {tokens}: "
            "leave --yarn_from out for this model"
        )


def build_model(config: PreTrainedConfig, folder: str | None, *, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model with the weights in ``folder``, fresh ones if there are none.

    While a ZeRO-3 configuration is in force (TrainingArguments or HfDeepSpeedConfig), Transformers partitions it at
    once.
    """
    if folder is not None and any(next(Path(folder).glob(pattern), None) for pattern in _WEIGHTS):
        return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    if is_deepspeed_zero3_enabled():
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.device(get_accelerator().current_device_name()):  # drawing billions of weights takes minutes on a CPU
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _json(source: str) -> dict[str, Any]:
    inline = source.lstrip().startswith(("{", "["))
    try:
        values = json.loads(source if inline else Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise SparseRingError(
            f"--fresh_config: {source} cannot be read: {error.strerror}: give a JSON object, or the path of a file with one"
        ) from None
    except ValueError as error:
        raise SparseRingError(
            f"--fresh_config: {source} is no JSON ({error}): write an object with model_type and sizes, in double quotes"
        ) from None
    if not isinstance(values, dict):
        raise SparseRingError(
            f"--fresh_config: {source} holds {type(values).__name__}, not an object: write model_type and sizes between braces"
        )
    return values
