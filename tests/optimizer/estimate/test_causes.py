"""Causes of out-of-memory by what a run noted, without a prediction and with the facts that only some devices have."""

from typing import Any, get_args

import pytest

from optimizer.estimate.job.causes import CAUSE_WORDS, Cause, describe_cause, name_cause, name_generation_cause

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
