"""Every field of a generation's plan is a knob: it can be written, read back and changed, alone or with others."""

from collections.abc import Iterator
from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.pins.generation_knobs import (
    change_generation,
    generation_knobs,
    knob_value,
    read_generation_change,
    with_knob,
    written_knobs,
)
from optimizer.plan.weights import WeightsPlan

PLAN = GenerationPlan(
    batch_size=8,
    num_micro_batches=2,
    prefill_tokens=16,
    weights=WeightsPlan(dtype="bf16", place="host", prefetch=2, frozen="int8"),
    kv_cache=KvCachePlan(dtype="int4", place="disk", prefetch=3),
)


def leaves(document: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_decision_of_the_plan_is_a_knob() -> None:
    of_the_search = {"layout.num_replicas", "layout.stage_blocks"}
    assert set(leaves(PLAN.to_json())) - set(generation_knobs()) == {
        "version", "weights.autocast", "weights.master", *of_the_search
    }  # fmt: skip


@pytest.mark.parametrize("plan", [PLAN, GenerationPlan()])
def test_what_is_written_of_a_plan_makes_any_other_the_same(plan: GenerationPlan) -> None:
    texts = [f"{path}={text}" for path, text in written_knobs(plan).items()]
    for other in (GenerationPlan(), PLAN):
        assert change_generation(other, read_generation_change(texts)) == plan


def test_a_change_leaves_all_else_as_it_is() -> None:
    changed = with_knob(PLAN, "kv_cache.dtype", "same")
    differing = [path for path in generation_knobs() if knob_value(changed, path) != knob_value(PLAN, path)]
    assert differing == ["kv_cache.dtype"]


def test_no_limit_is_written_as_all() -> None:
    assert written_knobs(GenerationPlan())["prefill_tokens"] == "all"
    assert read_generation_change(["prefill_tokens=all"]) == {"prefill_tokens": None}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_cache": {"place": "moon"}}, "change.kv_cache.place"),
        ({"kv_cache": 3}, "change.kv_cache"),
        ({"wings": 2}, "change.wings"),
        ({"batch_size": "many"}, "change.batch_size"),
        ({"batch_size": 0}, "plan.batch_size"),
        ({"kv_cache": {"prefetch": 9}}, "plan.kv_cache.prefetch"),
    ],
)
def test_what_is_no_part_of_a_plan_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        change_generation(PLAN, change)
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize("text", ["wings=2", "batch_size", "=8", "weights.autocast=bf16"])
def test_a_text_that_names_no_knob_says_which_there_are(text: str) -> None:
    with pytest.raises(InvalidPlan, match="KNOB=VALUE with one of batch_size, num_micro_batches"):
        read_generation_change([text])
