"""Plans of training: JSON there and back, values that are refused by name, and decisions that cannot go together."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import MAX_CHUNKS, LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan, split_state
from optimizer.plan.plan import Plan
from optimizer.plan.weights import PACKED_SIZES, FrozenFormat, WeightsPlan
from optimizer.workload import Adapter, TrainingWorkload

PLAIN = Plan(
    batch=BatchPlan(micro_batch_size=2, accumulation_steps=2),
    activations=ActivationsPlan(per_block=("keep", "recompute", "offload")),
)
ON_HOST: dict[str, Any] = {"gradients": GradientsPlan(choice="host"), "optimizer_state": OptimizerStatePlan(place="host")}
WORKLOAD = TrainingWorkload(sequence_length=16, global_batch_size=4, max_grad_norm=1.0)


def whole_batch(**changes: Any) -> Plan:
    """A plan of one micro-batch."""
    return replace(PLAIN, batch=BatchPlan(micro_batch_size=4, accumulation_steps=1), **changes)


def test_a_plan_survives_json() -> None:
    plan = replace(
        PLAIN,
        **ON_HOST,
        weights=WeightsPlan(dtype="bf16", place="disk", prefetch=3),
        logits_and_loss=LogitsAndLossPlan(num_chunks=5),
    )
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.fingerprint == plan.fingerprint != PLAIN.fingerprint


def test_a_plan_of_the_first_version_takes_the_defaults_of_what_came_later() -> None:
    document = PLAIN.to_json() | {"version": 1}
    del document["allocator"], document["logits_and_loss"]
    assert replace(Plan.from_json(document), version=2) == PLAIN


def test_lossless_plans_use_no_technique_that_rounds() -> None:
    assert replace(PLAIN, **ON_HOST).is_lossless
    assert not replace(PLAIN, weights=WeightsPlan(dtype="bf16")).is_lossless
    assert not replace(PLAIN, optimizer_state=OptimizerStatePlan(bits=8)).is_lossless


@pytest.mark.parametrize(
    ("path", "value", "allowed"),
    [
        ("batch.micro_batch_size", 0, {"minimum": 1}),
        ("batch.accumulation_steps", -1, {"minimum": 1}),
        ("logits_and_loss.num_chunks", 0, {"minimum": 1, "maximum": MAX_CHUNKS}),
        ("logits_and_loss.num_chunks", MAX_CHUNKS + 1, {"minimum": 1, "maximum": MAX_CHUNKS}),
        ("optimizer_state.fraction", 0.0, {"minimum": 0, "maximum": 1}),
        ("optimizer_state.fraction", 1.01, {"minimum": 0, "maximum": 1}),
        ("weights.prefetch", 9, {"minimum": 0, "maximum": 8}),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_the_range(path: str, value: float, allowed: dict[str, int]) -> None:
    document = PLAIN.to_json()
    row, column = path.split(".")
    document[row][column] = value
    with pytest.raises(InvalidPlan) as caught:
        Plan.from_json(document)
    assert caught.value.fields == {"field": f"plan.{path}", "value": value, "allowed": allowed}


@pytest.mark.parametrize(
    ("row", "choices", "field"),
    [
        ("weights", {"dtype": "bf16", "autocast": "bf16"}, "plan.weights.autocast"),
        ("weights", {"dtype": "fp16", "master": "none"}, "plan.weights.master"),
        ("optimizer_state", {"bits": 8, "place": "host"}, "plan.optimizer_state.place"),
    ],
)
def test_two_choices_of_one_row_that_exclude_each_other_are_refused(row: str, choices: dict[str, Any], field: str) -> None:
    document = PLAIN.to_json()
    document[row] |= choices
    with pytest.raises(InvalidPlan) as caught:
        Plan.from_json(document)
    assert caught.value.fields["field"] == field
    assert caught.value.fields["value"] == choices[field.rpartition(".")[2]]


def test_a_choice_that_nobody_knows_is_refused_with_those_that_there_are() -> None:
    document = PLAIN.to_json()
    document["gradients"]["choice"] = "drop"
    with pytest.raises(InvalidPlan, match=r"plan\.gradients\.choice") as caught:
        Plan.from_json(document)
    assert caught.value.fields["field"] == "plan.gradients.choice"
    for choice in ("keep", "consume", "host"):
        assert choice in caught.value.message


def test_a_plan_for_another_depth_is_refused() -> None:
    with pytest.raises(InvalidPlan, match=r"plan\.activations\.per_block names 3 blocks; the model has 4") as caught:
        PLAIN.check(num_blocks=4, workload=WORKLOAD)
    assert caught.value.fields == {"field": "plan.activations.per_block", "value": 3, "allowed": 4}


def test_a_plan_for_another_batch_is_refused() -> None:
    with pytest.raises(InvalidPlan, match=r"makes 4 sequences per step; workload\.global_batch_size is 6") as caught:
        PLAIN.check(num_blocks=3, workload=replace(WORKLOAD, global_batch_size=6))
    assert caught.value.fields == {"field": "plan.batch", "value": 4, "allowed": 6}


UNCLIPPED = replace(WORKLOAD, max_grad_norm=None)
CONSUME = {"gradients": GradientsPlan(choice="consume")}
CONFLICTS: dict[str, tuple[Plan, TrainingWorkload, str, str]] = {
    "consume over micro-batches": (replace(PLAIN, **CONSUME), UNCLIPPED, "gradients.choice", "needs one micro-batch per step"),
    "consume and clip": (whole_batch(**CONSUME), WORKLOAD, "gradients.choice", "cannot clip to a global norm"),
    "consume in fp16": (
        whole_batch(**CONSUME, weights=WeightsPlan(dtype="fp16")), UNCLIPPED, "gradients.choice", "cannot skip a step",
    ),
    "consume beside state on the host": (
        whole_batch(**{**ON_HOST, **CONSUME}), UNCLIPPED, "gradients.choice", "updates on the device",
    ),
    "state on the host, gradients on the device": (
        replace(PLAIN, optimizer_state=OptimizerStatePlan(place="host")), WORKLOAD, "gradients.choice", "leaves gradients on the",
    ),
    "weights away, state on the device": (
        replace(PLAIN, weights=WeightsPlan(place="host")), WORKLOAD, "weights.place", "streams trained weights",
    ),
    "frozen weights packed, all of them trained": (
        replace(PLAIN, weights=WeightsPlan(frozen="int8")), WORKLOAD, "weights.frozen", "applies to weights under adapters",
    ),
    "8-bit state of SGD": (
        replace(PLAIN, optimizer_state=OptimizerStatePlan(bits=8)), replace(WORKLOAD, optimizer="sgd"),
        "optimizer_state.bits", "is AdamW",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFLICTS)
def test_decisions_that_cannot_go_together_are_refused_by_name(name: str) -> None:
    plan, workload, path, why = CONFLICTS[name]
    conflict = plan.find_conflict(workload)
    assert conflict is not None
    assert conflict.fields["field"] == f"plan.{path}"
    assert why in conflict.message
    with pytest.raises(InvalidPlan, match=why):
        plan.check(num_blocks=3, workload=workload)


def test_under_adapters_frozen_weights_may_be_packed_and_streamed() -> None:
    plan = replace(PLAIN, weights=WeightsPlan(frozen="int8", place="host"))
    assert plan.find_conflict(replace(WORKLOAD, adapter=Adapter(rank=4))) is None


def test_a_share_of_the_state_leaves_in_whole_tensors_and_never_more_than_the_share() -> None:
    sizes = [40, 100, 10, 50]
    assert split_state(OptimizerStatePlan(), sizes) == [False] * 4
    assert split_state(OptimizerStatePlan(place="host"), sizes) == [True] * 4
    half = split_state(OptimizerStatePlan(place="host", fraction=0.5), sizes)
    assert half == [True, False, True, True]
    assert sum(size for size, leaves in zip(sizes, half, strict=True) if leaves) <= 0.5 * sum(sizes)


def test_every_packed_format_has_its_sizes() -> None:
    assert set(PACKED_SIZES) == set(get_args(FrozenFormat)) - {"same"}
    assert PACKED_SIZES["int8"].count_bytes(1000, num_rows=10, bytes_per_element=2) == 1020
    assert PACKED_SIZES["nf4"].count_bytes(65, num_rows=1, bytes_per_element=2) == 2 * (32 + 4)
