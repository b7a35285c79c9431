"""A profile of which only a part was traced prices that part as a whole one does, and refuses the rest."""

import json
from dataclasses import replace
from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan, InvalidWorkload, NotProfiled
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.devices import table_machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.assemble.merge import merge_profiles
from optimizer.profile.extent import EVERYTHING, Extent
from optimizer.profile.plan_extent import extent_of_plans
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload
from tests.optimizer.profile.conftest import LLAMA

MACHINE = table_machine("RTX 4090")
WINDOWED: dict[str, Any] = {**LLAMA, "model_type": "mistral", "sliding_window": 24}


def make_plan(
    choice: str = "keep", *, micro_batch_size: int = 2, steps: int = 2, weights: WeightsPlan | None = None
) -> Plan:
    return Plan(
        batch=BatchPlan(micro_batch_size=micro_batch_size, accumulation_steps=steps),
        weights=weights or WeightsPlan(),
        activations=ActivationsPlan(per_block=(choice, "keep")),
    )


def workload_of(plan: Plan, sequence_length: int = 40) -> TrainingWorkload:
    return TrainingWorkload(sequence_length=sequence_length, global_batch_size=plan.batch.global_batch_size)


def price(profile: Profile, plan: Plan) -> Prediction:
    """All but the timeline: what no traced choice holds goes inside a task, not between two, which makes a point less."""
    prediction = estimate_training(profile, plan=plan, workload=workload_of(plan), machine=MACHINE)
    return replace(prediction, timeline=())


def trace(config: dict[str, Any], extent: Extent) -> Profile:
    from optimizer.profile.trace.trace import profile_model

    return profile_model(read_model_spec(config), extent=extent)


@pytest.fixture(scope="module")
def plain() -> Profile:
    """Kept blocks in fp32 with more than one sequence at once."""
    plan = make_plan()
    return trace(LLAMA, extent_of_plans([plan], workload=workload_of(plan)))


@pytest.mark.parametrize(
    ("choice", "weights"),
    [
        ("keep", WeightsPlan()),
        ("recompute", WeightsPlan(dtype="bf16")),
        ("selective", WeightsPlan(autocast="fp16")),
        ("offload", WeightsPlan()),
        ("offload_disk", WeightsPlan(dtype="fp16")),
    ],
)
def test_what_one_plan_needs_prices_it_as_the_whole_does(profile: Profile, choice: str, weights: WeightsPlan) -> None:
    plan = make_plan(choice, weights=weights)
    partial = trace(LLAMA, extent_of_plans([plan], workload=workload_of(plan)))
    assert partial.is_partial
    assert price(partial, plan) == price(profile, plan)


@pytest.mark.parametrize("config", [WINDOWED, {**LLAMA, "model_type": "gpt2"}], ids=["mistral", "gpt2"])
def test_so_it_does_for_other_models(config: dict[str, Any]) -> None:
    if config["model_type"] == "gpt2":
        config = {"model_type": "gpt2", "vocab_size": 131, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    whole = trace(config, Extent(representations=("fp32",)))
    for choice in ("keep", "recompute", "offload"):
        plan = make_plan(choice, micro_batch_size=1)
        assert price(trace(config, extent_of_plans([plan], workload=workload_of(plan))), plan) == price(whole, plan)


def test_a_whole_profile_does_not_say_it_is_partial(profile: Profile) -> None:
    assert not profile.is_partial
    assert profile.covers(EVERYTHING)


def test_only_the_range_of_the_asked_shape_is_traced(plain: Profile) -> None:
    assert [(regime.micro_batch_low, list(regime.templates)) for regime in plain.regimes["fp32"]] == [(2, ["keep"])]
    assert list(plain.regimes) == ["fp32"]


def test_it_says_in_json_that_it_is_partial(plain: Profile) -> None:
    again = Profile.from_json(json.loads(json.dumps(plain.to_json())))
    assert again == plain
    assert again.is_partial


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (make_plan("recompute"), "blocks that recompute"),
        (make_plan(weights=WeightsPlan(dtype="bf16")), "bf16 weights"),
        (make_plan(micro_batch_size=1, steps=4), "micro-batches of 1 sequences of 40 tokens"),
    ],
)
def test_what_a_partial_profile_lacks_is_refused_by_name(plain: Profile, plan: Plan, what: str) -> None:
    with pytest.raises(NotProfiled, match=f"this profile is partial and does not hold {what}"):
        price(plain, plan)


def test_it_knows_what_it_covers(plain: Profile) -> None:
    asked = Extent(representations=("fp32",), choices=("keep",), shapes=((7, 30),))
    assert plain.covers(asked)
    for more in (
        Extent(representations=("fp16",)),
        Extent(choices=("offload",)),
        Extent(shapes=((1, 30),)),
    ):
        assert not plain.covers(asked.union(more))
    assert not plain.covers(EVERYTHING)


def test_two_parts_joined_price_what_either_could(profile: Profile, plain: Profile) -> None:
    plan = make_plan("selective", micro_batch_size=1, weights=WeightsPlan(dtype="bf16"))
    other = trace(LLAMA, extent_of_plans([plan], workload=workload_of(plan)))
    joined = merge_profiles(plain, other)
    assert joined.is_partial
    assert Profile.from_json(joined.to_json()) == joined
    for wanted in (make_plan(), plan):
        assert price(joined, wanted) == price(profile, wanted)


def test_joined_with_the_whole_it_is_the_whole(profile: Profile, plain: Profile) -> None:
    assert merge_profiles(plain, profile) is profile
    assert merge_profiles(profile, plain) is profile


def test_the_profile_with_more_choices_is_taken_for_one_range(profile: Profile, plain: Profile) -> None:
    plan = make_plan("offload")
    more = trace(LLAMA, extent_of_plans([plan], workload=workload_of(plan)))
    for joined in (merge_profiles(plain, more), merge_profiles(more, plain)):
        assert [list(regime.templates) for regime in joined.regimes["fp32"]] == [["keep", "offload"]]
        assert price(joined, plan) == price(profile, plan)


def test_a_shape_beyond_the_position_table_is_refused_before_anything_is_traced() -> None:
    with pytest.raises(InvalidWorkload, match="sequence_length is 65; this model has positions for 8 to 64 tokens"):
        trace(LLAMA, Extent(shapes=((1, 65),)))


def test_an_unknown_representation_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="int3, which this profile does not know; known: fp32, bf16, "):
        trace(LLAMA, Extent(representations=("int3",)))
