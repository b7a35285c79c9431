"""Causes of out-of-memory by what a run noted, without a prediction and with the facts that only some devices have."""

from typing import Any, get_args

import pytest

from optimizer.estimate.job.causes import CAUSE_WORDS, Cause, describe_cause, name_cause, name_generation_cause
from optimizer.estimate.prediction import Prediction, RankPrediction

FULL: dict[str, Any] = {
    "tier": "device",
    "requested_bytes": 200,
    "in_use_bytes": 900,
    "budget_bytes": 1000,
    "allowed_bytes": 1000,
    "stage": "steady_step",
    "moment": "in backward of block 1 of 3",
}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, "step"),
        ({"stage": "load"}, "load"),
        ({"stage": "resume"}, "resume"),
        ({"stage": "evaluation", "moment": "in head and loss"}, "evaluation"),
        ({"stage": "save", "tier": "host"}, "save"),
        ({"stage": "merge", "tier": "host"}, "export"),
        ({"tier": "host"}, "pinned_memory"),
        ({"moment": "in head and loss"}, "logits"),
        ({"moment": "in backward of head and loss"}, "logits"),
        ({"moment": "in optimizer step", "stage": "first_step"}, "first_update"),
        ({"is_reference": True, "moment": "in head and loss"}, "reference_model"),
        ({"batch_tokens": 96, "planned_tokens": 64}, "longest_batch"),
        ({"batch_tokens": 64, "planned_tokens": 64}, "step"),
        ({"slack_bytes": 100}, "fragmentation"),
        ({"slack_bytes": 99}, "step"),
        ({"budget_bytes": 950}, "another_process"),
        ({"budget_bytes": 950, "slack_bytes": 500}, "fragmentation"),
    ],
)
def test_the_cause_is_what_the_facts_of_the_moment_say(changes: dict[str, Any], cause: str) -> None:
    assert name_cause({**FULL, **changes}, prediction=None) == cause


def predict(**changes: Any) -> Prediction:
    return Prediction(
        device_peak_bytes=900,
        device_peak_low_bytes=900,
        device_peak_high_bytes=900,
        device_bytes_by_category={},
        host_peak_bytes=0,
        peak_moment="",
        step_ms=1,
        step_low_ms=1,
        step_high_ms=1,
        lane_busy_ms={},
        exposed_copy_ms=0,
        tokens_per_s=1,
        total_s=1,
        timeline=(),
        time_source="measured",
        **changes,
    )


def rank_of(memory_bytes: int, peak_bytes: int) -> RankPrediction:
    return RankPrediction(
        device="card", num_sequences=1, memory_bytes=memory_bytes, peak_bytes=peak_bytes, peak_high_bytes=peak_bytes, step_ms=1
    )


@pytest.mark.parametrize(("category", "otherwise"), [("activations", "step"), ("temporaries", "kernel_scratch")])
@pytest.mark.parametrize(
    ("peaks", "rank", "is_uneven"),
    [
        ((900, 700), 0, True),
        ((900, 700), 1, False),
        ((900, 701), 0, False),  # dealt out evenly it would not have fitted either
        ((900, 900), 0, False),
        ((), None, False),
    ],
)
def test_the_fullest_rank_ran_out_by_its_placement_where_an_even_one_had_room(
    peaks: tuple[int, ...], rank: int | None, category: str, otherwise: str, *, is_uneven: bool
) -> None:
    fields = {**FULL, "rank": rank, "category": category}
    assert name_cause(fields, prediction=predict(rank_peak_bytes=peaks)) == ("uneven_placement" if is_uneven else otherwise)


def test_a_cause_that_an_even_placement_has_too_stays_that() -> None:
    prediction = predict(rank_peak_bytes=(900, 100))
    assert name_cause({**FULL, "rank": 0, "category": "logits_and_loss"}, prediction=prediction) == "logits"
    assert name_cause({**FULL, "rank": 0, "stage": "load"}, prediction=prediction) == "load"


def test_of_unequal_devices_the_fullest_is_the_one_with_the_least_room() -> None:
    prediction = predict(rank_peak_bytes=(900, 1500), ranks=(rank_of(1000, 900), rank_of(2400, 1500)))
    fields = {**FULL, "category": "activations"}
    assert name_cause({**fields, "rank": 0}, prediction=prediction) == "uneven_placement"
    assert name_cause({**fields, "rank": 1}, prediction=prediction) == "step"


@pytest.mark.parametrize("moment", ["in synchronization", "inside an op in synchronization"])
def test_what_ranks_bring_together_after_steps_alone_is_a_collectives(moment: str) -> None:
    assert name_cause({**FULL, "moment": moment}, prediction=None) == "collectives"


def test_what_only_a_cards_counters_saw_is_of_the_moment_of_the_peak() -> None:
    assert name_cause({**FULL, "moment": "inside an op in head and loss"}, prediction=None) == "logits"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"moment": "in loading"}, "load"),
        ({"moment": "in prefill of block 1 of 3"}, "prefill"),
        ({"moment": "in head of decode (token 4)", "tier": "host"}, "decode"),
        ({"slack_bytes": 100}, "fragmentation"),
        ({"budget_bytes": 950}, "another_process"),
    ],
)
def test_the_cause_of_a_generation_is_its_moment_or_what_lies_outside(changes: dict[str, Any], cause: str) -> None:
    assert name_generation_cause({**FULL, **changes}) == cause
    assert describe_cause(cause, stage="")


def test_every_cause_has_words_and_a_step_says_which() -> None:
    assert set(CAUSE_WORDS) == set(get_args(Cause))
    assert describe_cause("logits", stage="first_step") == "in the first step: the logits and the loss took more than predicted"
    assert describe_cause("evaluation", stage="evaluation") == "an evaluation took more than predicted"
    assert describe_cause("", stage="steady_step") == ""
