"""Error messages of the configuration: what was found, what is allowed, and the way out."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from ds_sparse_ring.errors import SparseRingError

# Sections that DeepSpeed or Transformers would trip over later, with messages that do not name the cause.
_FOREIGN_SECTIONS = {
    "sparse_attention": (
        "is the section of DeepSpeed's own block-sparse attention, which was removed; DeepSpeed stops when it sees it. "
        'Take it out and put the settings of this package into the section "sparse_ring"'
    ),
    "sequence_parallel_size": (
        "belongs to another sequence parallelism, which Trainer and from_pretrained cannot read from this file: "
        'remove it and write "sparse_ring": {{"degree": {value}}}'
    ),
}

# What is no key here for a reason, and what to do instead.
_NO_KEYS = {
    "causal": "attention is always causal; leave it out, and keep other models on their own attention",
    "dropout": "the kernels have none; leave it out",
    "sequence_parallel_size": 'write "degree", the ranks that share a sequence',
    "sp_size": 'write "degree", the ranks that share a sequence',
}


# Keys of the section that DeepSpeed has, too, outside of it and with another meaning.
_DEEPSPEED_KEYS = {"checkpoint"}

# What pydantic calls these types, and what they are in JSON.
_JSON_TYPES = {
    "model_type": "should be an object in braces",
    "model_attributes_type": "should be an object in braces",
    "tuple_type": "should be a list in brackets",
    "list_type": "should be a list in brackets",
}


def section_of(config: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """The section ``name`` of a DeepSpeed configuration; ``where`` says in messages where the configuration is from.

    Raises:
        SparseRingError: if the section is missing or no object, or if a section that cannot work beside it is there.
    """
    for key, reason in _FOREIGN_SECTIONS.items():
        if key in config:
            raise SparseRingError(f'"{key}" in {where} {reason.format(value=_shown(config[key]))}')
    if name not in config:
        near = difflib.get_close_matches(name, [str(key) for key in config], n=1)
        hint = f' (did you mean it by "{near[0]}"?)' if near else ""
        raise SparseRingError(f'{where} has no section "{name}"{hint}: add "{name}": {{}} to use the defaults')
    section = config[name]
    if not isinstance(section, Mapping):
        raise SparseRingError(
            f'the section "{name}" of {where} is {_shown(section)}, not an object: "{name}": {{}} means the defaults'
        )
    return section


def refuse_strays(config: Mapping[str, Any], keys: Iterable[str], name: str, where: str) -> None:
    """Refuse keys of the section that stand beside it: neither DeepSpeed nor this package would read them there.

    Raises:
        SparseRingError: naming the first such key.
    """
    for key in keys:
        if key in config and key not in _DEEPSPEED_KEYS:
            raise SparseRingError(
                f'"{key}" in {where} stands beside the section "{name}", where nothing reads it: move it into the section'
            )


def refuse_auto(section: Mapping[str, Any], path: str) -> None:
    """Refuse the string "auto" anywhere in the section.

    Transformers takes every "auto" of the file for a value that it has to fill, and stops at those it does not know.

    Raises:
        SparseRingError: naming the first key that holds it.
    """
    for key, value in section.items():
        if isinstance(value, Mapping):
            refuse_auto(value, f"{path}.{key}")
        elif value == "auto":
            raise SparseRingError(
                f'{path}.{key} = "auto": Transformers tries to fill every "auto" of the file and cannot fill this one: '
                "leave the key out to get the default, or write a value"
            )


def describe_validation_error(error: ValidationError, model: type[BaseModel], section: str) -> str:
    """One message for all problems that pydantic found in ``section``, one line each."""
    # a default that follows from another field says nothing where that one is broken
    problems = [problem for problem in error.errors() if problem["type"] != "default_factory_not_called"]
    lines = [_describe(problem, model, section) for problem in problems]
    if len(lines) == 1:
        return lines[0]
    return "\n  ".join([f'{len(lines)} problems in the section "{section}":', *lines])


def list_problems(error: ValidationError) -> str:
    """What pydantic found, in one line: for files whose fields are no user's settings."""
    found = []
    for problem in error.errors():
        path, kind = ".".join(map(str, problem["loc"])), problem["type"]
        what = {"missing": "is missing", "extra_forbidden": "is unknown"}.get(kind)
        found.append(f"{path} {what}" if what else f"{path} = {_shown(problem['input'])}: {problem['msg']}")
    return "; ".join(found)


def _describe(problem: Any, model: type[BaseModel], section: str) -> str:
    keys, owner = _locate(problem["loc"], model)
    path = ".".join([section, *keys])
    kind, message, context = problem["type"], problem["msg"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{path} is unknown: {_nearest(keys[-1], owner, model, section)}"
    if kind == "union_tag_not_found":
        return f'{path} = {_shown(problem["input"])} needs a "kind": one of {_kind_names(owner, keys[-1])}'
    if kind == "union_tag_invalid":
        return f"{path}.kind = {_shown(context['tag'])} is unknown: use one of {_kind_names(owner, keys[-1])}"
    if kind == "missing":
        return f"{path} is missing: set it ({_sentence(owner.model_fields[keys[-1]].description or '')})"
    if kind == "value_error":  # raised by our own cross-field checks, whose text starts with the key
        return f"{path}.{context['error']}"
    field = owner.model_fields.get(keys[-1]) if keys else None
    meaning = f" ({_sentence(field.description)})" if field is not None and field.description else ""
    wanted = _JSON_TYPES.get(kind, message.replace("Input should", "should", 1))
    if field is not None and problem["input"] in [name for name, _ in _kinds(owner, keys[-1])]:
        wanted += f': write {{"kind": {_shown(problem["input"])}}}'
    return f"{path} = {_shown(problem['input'])}: {wanted}{meaning}"


def _locate(location: tuple[int | str, ...], model: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """Keys as the user wrote them, and the model that holds the last one.

    Inside a union, pydantic puts the tag between the two ("selector", "price", "p"); the user never wrote that level.
    """
    if len(location) < 2:
        return [str(part) for part in location], model
    field, tag, *rest = (str(part) for part in location)
    if (part := _part(model, field)) is not None:
        keys, owner = _locate((tag, *rest), part)
        return [field, *keys], owner
    owner = dict(_kinds(model, field)).get(tag, model)
    return [field, *rest], owner


def _part(model: type[BaseModel], field: str) -> type[BaseModel] | None:
    """The one model that a field holds, if it is no union of kinds."""
    for member in _members(model.model_fields[field].annotation):
        if isinstance(member, type) and issubclass(member, BaseModel) and "kind" not in member.model_fields:
            return member
    return None


def _members(annotation: Any) -> Iterator[Any]:
    """The types of a union, also of one inside another."""
    members = getattr(annotation, "__args__", ())
    if not members:
        yield annotation
    for member in members:
        yield from _members(member)


def _kinds(model: type[BaseModel], field: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The members of the union that a field holds, by their kind."""
    for member in _members(model.model_fields[field].annotation):
        if isinstance(member, type) and issubclass(member, BaseModel) and "kind" in member.model_fields:
            yield str(member.model_fields["kind"].default), member


def _kind_names(model: type[BaseModel], field: str) -> str:
    """The kinds that a field accepts, for a message."""
    return ", ".join(f'"{kind}"' for kind, _ in _kinds(model, field))


def _nearest(key: str, owner: type[BaseModel], model: type[BaseModel], section: str) -> str:
    homes = [
        f'"{name}" of kind "{kind}"'
        for name in model.model_fields
        for kind, member in _kinds(model, name)
        if key in member.model_fields
    ]
    for name in model.model_fields:
        if (part := _part(model, name)) is not None and part is not owner and key in part.model_fields:
            homes.append(f'the object "{name}"')
    if key in _NO_KEYS:
        return _NO_KEYS[key]
    if key in model.model_fields:
        return f'it belongs one level up, into the section "{section}"'
    if homes:
        return f"it belongs into {' or '.join(homes)}"
    near = difflib.get_close_matches(key, list(owner.model_fields), n=1)
    if near:
        return f'did you mean "{near[0]}"?'
    return "allowed are " + ", ".join(f'"{name}"' for name in owner.model_fields)


def _shown(value: Any) -> str:
    """A value as it stands in JSON, not in Python, and not longer than a line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _sentence(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
