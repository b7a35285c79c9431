"""The summary that the benchmark of batch generation makes of its rows."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.generation import drift, larger, plans, sweep, throughput


def raced(name: str, tokens_per_s: float, *, device: str = "cpu", peak_bytes: int = 10) -> dict[str, Any]:
    return {
        "what": "raced",
        "model": "opt",
        "name": name,
        "device": device,
        "tokens_per_s": tokens_per_s,
        "peak_bytes": peak_bytes,
        "budget_bytes": 10,
    }


def met_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {label: entry["met"] for label, entry in summary.items()}


def test_a_last_batch_of_fewer_sequences_takes_its_share() -> None:
    assert throughput.total_s([3.0, 1.0, 2.0], 10, 25) == pytest.approx(5.0)


@pytest.mark.parametrize(("device", "ours", "is_met"), [("cpu", 50.0, True), ("cpu", 49.0, False), ("cuda", 99.0, False)])
def test_ours_is_held_to_each_of_accelerates_offloads(device: str, ours: float, is_met: bool) -> None:
    rows = [raced("headroom", ours, device=device), raced("accelerate, host", 10.0, device=device), raced("transformers", 99.0)]
    label = "opt: times the throughput of accelerate, host"
    summary = throughput.summarize(rows)
    assert summary[label]["value"] == ours / 10
    assert met_of(summary) == {label: is_met, "our peaks over the budget": True}


def test_a_peak_over_the_budget_and_a_race_that_never_was_are_missed_goals() -> None:
    label = "our peaks over the budget"
    assert not throughput.summarize([raced("headroom", 50.0, peak_bytes=11)])[label]["met"]
    assert not throughput.summarize([])[label]["met"]


def larger_row(place: str, **changes: Any) -> dict[str, Any]:
    return {"what": "larger", "place": place, "peak_bytes": 9, "budget_bytes": 10, "equals_plain": True, **changes}


def test_of_runs_larger_than_the_device_both_places_must_finish_within_it_with_the_same_tokens() -> None:
    both = [larger_row("host"), larger_row("disk")]
    assert all(met_of(larger.summarize(both)).values())
    for rows in (both[:1], [both[0], larger_row("disk", peak_bytes=11)], [both[0], larger_row("disk", equals_plain=False)]):
        assert list(met_of(larger.summarize(rows)).values()).count(False) == 1


def plan_row(**changes: Any) -> dict[str, Any]:
    return {"what": "plan", "is_over": False, "is_off": False, "is_moved_off": False, "is_loose": False, **changes}


def test_plans_are_counted_and_none_may_be_off() -> None:
    rows = [plan_row()] * plans.LEAST_PLANS
    assert all(met_of(plans.summarize(rows)).values())
    assert not all(met_of(plans.summarize(rows[1:])).values())
    for name in ("is_over", "is_off", "is_moved_off", "is_loose"):
        assert list(met_of(plans.summarize([plan_row(**{name: True}), *rows])).values()).count(False) == 1


def swept(rate_error: float, *, peak_error: float = 0.0) -> dict[str, Any]:
    return {"what": "run", "peak_error": peak_error, "rate_error": rate_error, "peak_bytes": 9, "budget_bytes": 10}


def test_a_sweep_is_judged_by_its_worst_and_by_what_the_choice_cost() -> None:
    rows = [swept(0.1), swept(-0.2), {"what": "regret", "regret": 0.04}]
    summary = sweep.summarize(rows)
    assert summary["throughput error, worst"] == {
        "value": 0.2,
        "goal": "<= 0.15",
        "met": False,
        "needs": "full size",
    }
    assert summary["throughput error, median"]["value"] == 0.15
    assert summary["regret, worst"]["met"]
    assert not sweep.summarize([swept(0.0, peak_error=-0.03), rows[-1]])["peak error, worst"]["met"]


def test_errors_of_logits_are_by_their_spread_and_by_stretch() -> None:
    exact = torch.tensor([1.0, -1.0, 1.0, -1.0, 10.0, -10.0, 10.0, -10.0]).view(4, 2)
    found = exact + torch.tensor([0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2]).view(4, 2)
    first, last = drift.relative_errors(found, exact, num_stretches=2)
    assert first == pytest.approx(0.1 / exact[:2].std())
    assert last == pytest.approx(0.2 / exact[2:].std())


def test_drift_is_bounded_and_may_not_grow() -> None:
    rows = [
        {"what": "drift", "dtype": dtype, "worst": worst, "growth": growth}
        for dtype, worst, growth in (("int8", 0.01, 1.0), ("int4", 0.4, 1.3))
    ]
    assert list(met_of(drift.summarize(rows)).values()) == [True, False, False]
    assert not any(met_of(drift.summarize([])).values())


def test_a_run_is_divided_by_how_much_longer_than_usual_a_generation_beside_it_took(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now_s = 0.0

    def take(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    readings = iter([50.0, 10.0, 10.0, 30.0, 10.0, 10.0])
    durations = iter([1.0, 2.0, 2.0, 1.0])
    closed = []
    reference = SimpleNamespace(generate=lambda prompts: take(next(readings)), close=lambda: closed.append(True))
    monkeypatch.setattr(sweep, "Ours", lambda job, plan, meter: reference)
    monkeypatch.setattr("benchmarks.generation.sweep.time.perf_counter", lambda: now_s)
    with sweep._Clock(torch.device("cpu"), tmp_path) as clock:
        runs = clock.time(lambda: take(next(durations)), num_times=4)
        clock.settle()
        assert [run.seconds for run in runs] == [1.0, 2.0, 2.0, 1.0]
        assert [clock.median_s([run]) for run in runs] == [1.0, 1.0, 1.0, 1.0]
    assert closed


def test_on_a_card_a_run_is_timed_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "Ours", None)
    with sweep._Clock(torch.device("cuda"), tmp_path) as clock:
        runs = clock.time(lambda: None, num_times=1)
        clock.settle()
        assert clock.median_s(runs) == runs[0].seconds
