"""Lists the decisions on which plans differ, for comparisons and for the record of a re-plan.

``diff_plans`` lists the JSON fields that differ between two plans, ``different_cells`` the cells of the table that differ among
several: categories by lifetime, place and representation, in words; ``describe_change`` says it of two in one line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeVar

from optimizer.plan.activations import BlockChoice
from optimizer.plan.devices.stages import describe_cut
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan

P = TypeVar("P", Plan, GenerationPlan)
"""A plan of training or of generation."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One decision on which the plans disagree."""

    path: str
    """Dotted path in the JSON; neighbouring blocks are one: ``activations.per_block[0:8]``, the end not included."""
    a: Any
    b: Any


def diff_plans(a: P, b: P) -> list[Difference]:
    """All differences, in the order of the JSON. Plans of different depth differ in the whole of ``per_block``."""
    return list(_list_differences(a.to_json(), b.to_json(), path=""))


def _list_differences(a: Any, b: Any, *, path: str) -> Iterator[Difference]:
    if a == b:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from _list_differences(a.get(key), b.get(key), path=f"{path}.{key}" if path else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        yield from _merge_neighbours(a, b, path=path)
    else:
        yield Difference(path=path, a=a, b=b)


def _merge_neighbours(a: list[Any], b: list[Any], *, path: str) -> Iterator[Difference]:
    """Yield one difference for neighbours that differ in the same way."""
    for (left, right), group in groupby(enumerate(zip(a, b, strict=True)), key=lambda item: item[1]):
        indices = [index for index, _ in group]
        if left != right:
            first, last = indices[0], indices[-1]
            where = f"[{first}]" if first == last else f"[{first}:{last + 1}]"
            yield Difference(path=f"{path}{where}", a=left, b=right)


Aspect = Literal["lifetime", "place", "representation"]
_LIFETIMES: dict[str, str] = {
    "keep": "until the update",
    "consume": "until its weight is updated",
    "host": "until it has gone to the host",
}
_BLOCK_WORDS: dict[BlockChoice, str] = {
    "keep": "keep",
    "recompute": "recompute",
    "selective": "recompute cheap ops",
    "offload": "host",
    "offload_disk": "disk",
    "offload_remote": "remote",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the plan's table, for each of the plans compared."""

    category: str
    """Name of the category in the plan: ``optimizer_state``, ``batch``."""
    aspect: Aspect
    values: tuple[str, ...]
    """One text for each plan, in the order of the plans."""


def different_cells(plans: Sequence[Plan]) -> tuple[Cell, ...]:
    """Cells on which not all plans agree, in the order of the plan."""
    tables = [dict(_list_cells(plan)) for plan in plans]
    return tuple(
        Cell(category=category, aspect=aspect, values=tuple(table[category, aspect] for table in tables))
        for category, aspect in tables[0]
        if len({table[category, aspect] for table in tables}) > 1
    )


def describe_change(before: Plan, after: Plan) -> str:
    """``optimizer state, place: device to host; activations, lifetime: keep 3 to recompute 3``; empty for equal plans."""
    cells = different_cells([before, after])
    return "; ".join(
        f"{cell.category.replace('_', ' ')}, {cell.aspect}: {cell.values[0]} to {cell.values[1]}" for cell in cells
    )


def describe_generation_change(before: GenerationPlan, after: GenerationPlan) -> str:
    """``2 sequences at once, not 4; keys and values: device to host``; empty for equal plans."""
    parts: list[str] = []
    if (before.batch_size, before.num_micro_batches) != (after.batch_size, after.num_micro_batches):
        parts.append(f"{after.sequences_per_pass} sequences at once, not {before.sequences_per_pass}")
    if before.prefill_tokens != after.prefill_tokens:
        parts.append(f"prompts {after.prefill_tokens} tokens at a time" if after.prefill_tokens else "prompts whole")
    for name, here, there in (
        ("weights", before.weights, after.weights),
        ("keys and values", before.kv_cache, after.kv_cache),
    ):
        if here.place != there.place:
            parts.append(f"{name}: {here.place} to {there.place}")
        elif here != there:
            parts.append(f"{name}: held otherwise")
    return "; ".join(parts)


def _weights_place(plan: Plan) -> str:
    if plan.layout.is_cut:
        return f"cut into {describe_cut(plan.layout.stage_blocks, plan.layout.num_devices)}"
    if plan.layout.shares_blocks:
        return f"each block shared by {plan.layout.tensor}, {plan.weights.place}"
    return "devices" if plan.layout.shares_weights else plan.weights.place


def _list_cells(plan: Plan) -> Iterator[tuple[tuple[str, Aspect], str]]:
    weights, state, activations = plan.weights, plan.optimizer_state, plan.activations
    streams = plan.brings_weights
    share = f" {100 * state.fraction:.0f} %" if state.place != "device" and state.fraction < 1 else ""
    yield ("batch", "lifetime"), f"{plan.batch.micro_batch_size} x {plan.batch.accumulation_steps}"
    yield ("weights", "lifetime"), f"fetched {weights.prefetch} ahead" if streams else "always there"
    yield ("weights", "place"), _weights_place(plan)
    yield ("weights", "representation"), _weights_words(plan)
    yield ("gradients", "lifetime"), _LIFETIMES[plan.gradients.choice]
    yield ("gradients", "place"), "host" if plan.gradients.choice == "host" else "device"
    yield ("optimizer_state", "place"), f"{state.place}{share}"
    yield ("optimizer_state", "representation"), f"{state.bits} bits"
    yield ("activations", "lifetime"), _count_choices(activations.per_block, away=False)
    yield ("activations", "place"), _count_choices(activations.per_block, away=True)
    yield ("activations", "representation"), activations.compress if activations.num_offloaded else "none"
    chunks = plan.logits_and_loss.num_chunks
    yield ("logits_and_loss", "lifetime"), "all at once" if chunks == 1 else f"{chunks} chunks"
    yield ("allocator", "representation"), "expandable" if plan.allocator.expandable_segments else "as usual"


def _weights_words(plan: Plan) -> str:
    weights = plan.weights
    computed = weights.dtype if weights.autocast == "off" else f"{weights.dtype}, autocast {weights.autocast}"
    return computed if weights.frozen == "same" else f"{computed}, frozen {weights.frozen}"


def _count_choices(per_block: tuple[BlockChoice, ...], *, away: bool) -> str:
    """Count blocks by choice: ``recompute 23, keep 9``; with ``away``, only those that move their activations, by place."""
    chosen = [choice for choice in _BLOCK_WORDS if choice in per_block and choice.startswith("offload") == away]
    counted = ", ".join(f"{_BLOCK_WORDS[choice]} {per_block.count(choice)}" for choice in chosen)
    return counted or ("device" if away else "none")
