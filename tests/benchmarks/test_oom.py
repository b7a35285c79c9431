"""Sums up the rows of injected out-of-memories against their goals."""

from typing import Any

from benchmarks.oom.__main__ import summarize
from benchmarks.oom.cases import run_case


def row(**changes: Any) -> dict[str, Any]:
    good = {
        "what": "case",
        "ended": "done",
        "is_named_right": True,
        "num_retries": 1,
        "has_repeated": False,
        "most_steps_lost": 1,
        "longest_plan_s": 1.0,
    }
    return {**good, **changes}


def missed(*rows: dict[str, Any]) -> set[str]:
    return {name for name, entry in summarize(rows).items() if not entry["met"]} - {"out-of-memories injected"}


def test_cases_that_go_well_meet_every_goal_and_those_left_out_count_for_none() -> None:
    assert missed(row(), row(ended="named", num_retries=0), {"what": "left out"}) == set()


def test_each_fault_misses_its_own_goal() -> None:
    assert missed(row(is_named_right=False)) == {"causes named rightly"}
    assert missed(row(num_retries=2)) == {"the next plan fits at the first retry"}
    assert missed(row(ended="no plan found")) == {"the next plan fits at the first retry", "a plan fits by the second retry"}
    assert missed(row(has_repeated=True)) == {"plans tried twice"}
    assert missed(row(most_steps_lost=2)) == {"most steps lost, with a checkpoint each step"}
    assert missed(row(), {"what": "failed"}) == {"cases that broke"}


def test_a_drawn_case_is_injected_named_and_goes_on_under_another_plan() -> None:
    found = run_case(1, 0, causes=["logits"])
    assert (found["what"], found["ended"], found["named"]) == ("case", "done", "logits")
    assert (found["is_named_right"], found["has_repeated"]) == (True, False)
    assert found["most_steps_lost"] <= 1
