"""The jobs that regret is measured on, and what their rows come to."""

from typing import Any

from benchmarks.search.regret import draw_job, summarize


def job(**changes: Any) -> dict[str, Any]:
    return {"what": "job", "finished": True, "budget_bytes": 10, "peak_bytes": 9, "regret": 0.0, **changes}


def goals(*rows: dict[str, Any]) -> list[tuple[Any, bool]]:
    return [(entry["value"], entry["met"]) for entry in summarize(rows).values()]


def test_a_seed_and_an_index_name_one_job() -> None:
    assert draw_job(1, 2) == draw_job(1, 2)
    assert draw_job(1, 2) != draw_job(1, 3)
    assert draw_job(1, 2) != draw_job(2, 2)


def test_every_job_drawn_is_a_model_that_can_be_built() -> None:
    assert all(draw_job(3, index).subject.spec.num_parameters > 0 for index in range(40))


def test_regret_up_to_five_percent_meets_the_goal() -> None:
    assert goals(job(regret=0.05), job()) == [("2 of 2", True), ("2 of 2, worst 0.05", True)]


def test_a_larger_regret_or_a_peak_over_the_budget_misses_it() -> None:
    assert goals(job(regret=0.06), job(peak_bytes=11)) == [("1 of 2", False), ("1 of 2, worst 0.06", False)]


def test_a_job_without_a_plan_is_missed() -> None:
    unfinished = {"what": "job", "finished": False, "error": "no"}
    assert goals(unfinished) == [("0 of 1", False), ("0 of 1, worst None", False)]


def test_no_jobs_show_nothing() -> None:
    assert [met for _, met in goals()] == [False, False]
