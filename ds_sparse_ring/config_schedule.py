"""What of a schedule fits a selector, and the selectors that a curriculum passes through."""

from __future__ import annotations

from typing import Any

# numbers that say how, not how much
_NO_BUDGETS = {"seed", "stride", "block_tokens"}
# which read no query and no key, and are the same in all steps
_STATIC = ("full", "window", "longformer", "bigbird", "random_diagonals")
_WITH_DIAGONALS = ("price", "top_p", "fixed")
_WITH_PRICE = ("price", "every_query")


def check_schedule(schedule: Any, selector: Any) -> None:
    """Refuse what a selector cannot do.

    Args:
        schedule: a `ScheduleConfig`; selector: one of the kinds of `Selector`.

    Raises:
        ValueError: its text starts with the key, as seen from the section.
    """
    _check_curriculum(schedule, selector)
    _check_controller(schedule, selector)
    kind = selector.kind
    if schedule.refresh_steps > 1 and kind in _STATIC:
        raise ValueError(
            f'schedule.refresh_steps = {schedule.refresh_steps} has no effect on selector "{kind}", which is the same in all '
            "steps: leave it out"
        )
    if schedule.refresh_steps > 1 and schedule.reuse == "diagonals" and kind not in _WITH_DIAGONALS:
        raise ValueError(
            f'schedule.reuse = "diagonals" fits the selectors {_quoted(_WITH_DIAGONALS)}, but "{kind}" chooses tokens of a text: '
            'use reuse = "index", or leave refresh_steps out'
        )
    if schedule.explore_diagonals and kind not in _WITH_DIAGONALS:
        raise ValueError(
            f"schedule.explore_diagonals = {schedule.explore_diagonals} fits the selectors {_quoted(_WITH_DIAGONALS)}, not "
            f'"{kind}": leave it out'
        )
    if schedule.explore_steps > 1 and not schedule.explore_diagonals:
        raise ValueError(
            f"schedule.explore_steps = {schedule.explore_steps} needs explore_diagonals: how many are read in those steps"
        )


def _check_curriculum(schedule: Any, selector: Any) -> None:
    start, steps = schedule.start_selector, schedule.curriculum_steps
    if start is not None and schedule.target_density is not None:
        raise ValueError(
            "schedule.start_selector cannot stand beside target_density, which moves the price by itself: use start_density"
        )
    if schedule.start_density is not None and schedule.target_density is None:
        raise ValueError(
            f"schedule.start_density = {schedule.start_density:g} needs target_density: the density at the end of the curriculum"
        )
    has_start = start is not None or schedule.start_density is not None
    if steps and not has_start:
        raise ValueError(
            f"schedule.curriculum_steps = {steps} needs start_selector (with target_density: start_density), what to begin with"
        )
    if has_start and not steps:
        name = "start_selector" if start is not None else "start_density"
        raise ValueError(f"schedule.{name} needs curriculum_steps: how many steps it takes from there to what is configured")
    if start is None:
        return
    if start.kind != selector.kind:
        raise ValueError(
            f'schedule.start_selector is of kind "{start.kind}", the selector of kind "{selector.kind}": use the same kind'
        )
    for name, (begin, end) in _pairs(start, selector).items():
        if begin != end and (name in _NO_BUDGETS or not _number(begin) or not _number(end)):
            raise ValueError(
                f"schedule.start_selector.{name} = {_json(begin)} cannot move to the selector's {_json(end)}: write the same "
                "value in both"
            )


def _check_controller(schedule: Any, selector: Any) -> None:
    floor, target = schedule.min_layer_density, schedule.target_density
    for name, value in (("target_density", target), ("min_layer_density", floor)):
        if value is not None and selector.kind not in _WITH_PRICE:
            raise ValueError(
                f'schedule.{name} = {value:g} moves the price of {_quoted(_WITH_PRICE)}; this selector is "{selector.kind}": '
                "use one of them, or set the selector's own budget"
            )
    if floor is not None and target is not None and floor > target:
        raise ValueError(
            f"schedule.min_layer_density = {floor:g} is above target_density = {target:g}, the mean of all layers: lower the one "
            "or raise the other"
        )


def between(start: Any, selector: Any, share: float) -> Any:
    """The selector of a curriculum when ``share`` of its steps have passed, 0 to 1."""
    moved = {}
    for name, (begin, end) in _pairs(start, selector).items():
        if begin != end:
            value = number_between(begin, end, share)
            moved[name] = round(value) if isinstance(end, int) else value
    return selector.model_copy(update=moved)


def number_between(begin: float, end: float, share: float) -> float:
    """By equal factors from step to step, or by equal differences where a number is 0."""
    if share >= 1:
        return end
    if begin > 0 and end > 0:
        return float(begin * (end / begin) ** share)
    return begin + (end - begin) * share


def _pairs(start: Any, selector: Any) -> dict[str, tuple[Any, Any]]:
    return {name: (getattr(start, name), getattr(selector, name)) for name in type(selector).model_fields}


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def _json(value: Any) -> str:
    return "null" if value is None else f'"{value}"' if isinstance(value, str) else f"{value}"


def _quoted(kinds: tuple[str, ...]) -> str:
    return ", ".join(f'"{kind}"' for kind in kinds)
