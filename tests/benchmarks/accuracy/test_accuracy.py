"""The cases of the proof, the independent meter, the arithmetic of errors, and one tiny case from end to end."""

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._profiler import _EventType

from benchmarks.accuracy import command as accuracy
from benchmarks.accuracy import summary as accuracy_summary
from benchmarks.accuracy.cases import Case, is_held_back, list_cases, make_case, make_generation_case, make_module_case
from benchmarks.accuracy.configs import MODELS, SHAPES, WITHOUT_CACHE, Shape
from benchmarks.accuracy.meter import STEADY, AllocationProfile, read_peak
from benchmarks.accuracy.modules import PLAIN_MODULES
from benchmarks.accuracy.run import Bench, carry_out, measure_memory, time_steps
from benchmarks.accuracy.techniques import GENERATION, GENERATIONS, TECHNIQUES, merge_changes
from benchmarks.accuracy.times import (
    describe_pace,
    measure_times,
    median_times,
    paced_times,
    predicted_rows,
    spreads,
)
from benchmarks.common.estimators import ask_all
from benchmarks.common.journal import Journal
from optimizer.hardware.machine import Device, Machine
from optimizer.hardware.rates import Rates
from optimizer.plan.generation import GenerationPlan

SPLIT_SHA256 = "7d7a8a1db2331b5152f8d2481054b68e37ce323af1a343e5297f1ed51f9787ad"
"""Hash of the names held back, sorted, one a line. If it changes, earlier fits are judged on cases that they have seen."""
MACHINE = Machine(
    name="any",
    device=Device(kind="cpu", name="cpu", memory_bytes=2**34),
    host_memory_bytes=2**34,
    rates=Rates(
        matmul_flops_per_s={"fp32": 1e11, "bf16": 1e11},
        attention_flops_per_s={"fp32": 1e11, "bf16": 1e11},
        memory_bytes_per_s=1e10,
        op_overhead_s=1e-6,
        device_to_host_bytes_per_s=1e10,
        host_to_device_bytes_per_s=1e10,
        optimizer_elements_per_s={"adamw_32": 1e9, "adamw_8": 1e9},
        source="table",
    ),
)
TINY = Shape(
    hidden_size=32,
    intermediate_size=64,
    num_blocks=2,
    num_heads=2,
    num_key_value_heads=1,
    vocab_size=96,
    sequence_length=24,
    global_batch_size=2,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return list_cases()


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[Case, Bench]]:
    """A case small enough for a test, and a bench that has its profile."""
    SHAPES["test"] = TINY
    try:
        yield make_case("gpt2", "test", ("recompute",)), Bench(MACHINE)
    finally:
        del SHAPES["test"]


def test_there_are_more_than_two_hundred_cases_of_many_models_and_all_names_differ(cases: list[Case]) -> None:
    assert len(cases) >= 200
    assert len({case.name for case in cases}) == len(cases)
    assert {case.model for case in cases} == set(MODELS) | set(PLAIN_MODULES)
    assert len(MODELS) >= 20
    assert all(len({case.shape for case in cases if case.model == model}) >= 3 for model in MODELS)


def test_padded_batches_and_plain_modules_are_among_them(cases: list[Case]) -> None:
    padded = [case for case in cases if case.is_padded]
    assert len({case.model for case in padded}) >= 5
    assert len(padded) >= 25
    modules = [case for case in cases if case.module is not None]
    assert {case.model for case in modules} == set(PLAIN_MODULES)
    assert len(modules) >= 30


def test_every_technique_is_there_alone_and_in_combination(cases: list[Case]) -> None:
    training = [case for case in cases if GENERATION not in case.techniques]
    alone = {case.techniques[0] for case in training if len(case.techniques) == 1}
    together = {name for case in training if len(case.techniques) > 1 for name in case.techniques}
    assert alone == together == set(TECHNIQUES)


def test_both_workloads_are_there_for_every_model_that_generates(cases: list[Case]) -> None:
    generating = [case for case in cases if GENERATION in case.techniques]
    assert {case.model for case in generating} == set(MODELS) - WITHOUT_CACHE
    assert {name for case in generating for name in case.techniques[1:]} == set(GENERATIONS)


def test_every_case_can_be_carried_out(cases: list[Case]) -> None:
    for case in cases:
        if isinstance(case.plan, GenerationPlan):
            case.plan.check(workload=case.workload, max_sequence_length=case.spec.max_sequence_length)
        else:
            case.plan.check(num_blocks=case.num_blocks, workload=case.workload)


def test_a_fixed_fifth_is_held_back(cases: list[Case]) -> None:
    assert 0.15 < sum(case.is_held_back for case in cases) / len(cases) < 0.25
    first = [case for case in cases if case.module is None and not case.is_padded]
    held_back = sorted(case.name for case in first if case.is_held_back)
    assert any(case.is_timed and case.is_held_back for case in cases)
    assert hashlib.sha256("\n".join(held_back).encode()).hexdigest() == SPLIT_SHA256


def test_whether_a_case_is_held_back_depends_on_its_name_alone() -> None:
    assert is_held_back("gpt2/odd/plain")
    assert not is_held_back("gpt2/tiny/plain")


def test_changes_of_several_techniques_are_joined() -> None:
    merged = merge_changes(("lora", "unclipped", "streamed"))
    assert merged["work"].keys() == {"adapter", "max_grad_norm"}
    assert merged["weights"] == {"place": "host"}


def event(name: str = "", *, time_ns: int, ptr: int = 0, size: int = 0) -> SimpleNamespace:
    fields = SimpleNamespace(ptr=ptr, alloc_size=size)
    tag = _EventType.Allocation if size else _EventType.TorchOp
    return SimpleNamespace(name=name, tag=tag, start_time_ns=time_ns, end_time_ns=time_ns + 100, extra_fields=fields)


def test_the_peak_is_of_the_steady_step_and_without_the_hosts_buffers() -> None:
    peak = read_peak(
        [
            event(time_ns=0, ptr=1000, size=500),
            event(time_ns=1, ptr=2000, size=900),
            event(time_ns=2, ptr=2000, size=-900),
            event(STEADY, time_ns=10),
            event(time_ns=11, ptr=3000, size=40),
            event(time_ns=12, ptr=4000, size=7),
            event("headroom: on the host:3000", time_ns=13),
            event(time_ns=14, ptr=4000, size=-7),
            event(time_ns=200, ptr=5000, size=10_000),
        ]
    )
    assert (peak.device_bytes, peak.total_bytes) == (507, 547)


def test_an_address_that_is_given_out_again_was_released_unheard() -> None:
    peak = read_peak(
        [
            event(STEADY, time_ns=0),
            event(time_ns=1, ptr=1000, size=500),
            event(time_ns=2, ptr=1200, size=100),
            event(time_ns=3, ptr=9000, size=-64),
        ]
    )
    assert peak.device_bytes == 500


def test_a_profile_without_a_steady_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="no steady step"):
        read_peak([event(time_ns=0, ptr=1, size=1)])


def test_the_profiler_hears_of_real_allocations_and_forgets_what_a_thread_let_go() -> None:
    with AllocationProfile() as profiled:
        kept = [torch.zeros(1000), torch.zeros(70)]
        thread = threading.Thread(target=kept.pop)
        thread.start()
        thread.join()
        with profiled.steady_step():
            torch.zeros(3000)
    assert profiled.peak.device_bytes == 16_000
    assert len(kept) == 1


def test_bytes_of_a_case_are_predicted_to_the_meters_and_nearly_to_the_profilers(tiny: tuple[Case, Bench]) -> None:
    case, bench = tiny
    row = measure_memory(bench, case)
    assert row["error_to_meter_bytes"] == row["host_error_bytes"] == row["disk_error_bytes"] == 0
    assert row["wrong_categories"] == {}
    assert row["stage_error_bytes"] == {"first_step": 0, "evaluation": 0}
    # torch keeps the state of each recomputed block's random numbers, 5,056 bytes, outside of any op.
    assert 0 <= row["unseen_by_meter_bytes"] <= 2 * 5056 + 1000
    assert row["verdicts"]["-1 %"] != "fits"
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize("case", [make_module_case("mixer", ("recompute",)), make_case("gpt2", "tiny", (), is_padded=True)])
def test_a_plain_module_and_padded_batches_are_held_against_both_meters_too(case: Case) -> None:
    row = measure_memory(Bench(MACHINE), case)
    assert row["error_to_meter_bytes"] == row["host_error_bytes"] == 0
    assert row["stage_error_bytes"] == {"first_step": 0, "evaluation": 0}
    assert abs(row["error"]) < 0.01


def test_a_generation_is_held_against_both_meters_too(tiny: tuple[Case, Bench]) -> None:
    _, bench = tiny
    row = measure_memory(bench, make_generation_case("gpt2", "test", (), prompt=(8, 4, 2)))
    assert row["error_to_meter_bytes"] == 0
    assert row["wrong_categories"] == {}
    assert abs(row["error"]) < 0.01


@pytest.mark.parametrize("generates", [False, True])
def test_a_verdict_is_carried_out_on_both_sides(tiny: tuple[Case, Bench], generates: bool) -> None:
    case, bench = tiny
    row = carry_out(bench, make_generation_case("gpt2", "test", (), prompt=(8, 4, 2)) if generates else case)
    assert row["finished"]
    assert row["refused_below"]
    assert "in use" in row["refusal"]


def test_times_are_predicted_with_what_was_fitted_to_cases_that_are_not_held_back(tiny: tuple[Case, Bench]) -> None:
    case, bench = tiny
    assert not case.is_held_back
    prediction: Any = bench.predict(case)
    slow_ms = 1.7 * prediction.step_ms
    timed = {"what": "step times", "case": case.name, "step_ms": [slow_ms], "yardstick_ms": [9.0, 9.0]}
    (row,) = predicted_rows(bench, [case], [timed])
    assert abs(row["error"]) < 0.1
    assert row["as_timed_error"] == pytest.approx(row["error"], rel=1e-3)
    assert row["uncalibrated_ms"] == pytest.approx(row["measured_ms"] / 1.7, rel=0.01)


def test_steps_are_timed_one_by_one_with_the_load_beside_them(tiny: tuple[Case, Bench]) -> None:
    row = time_steps(tiny[0], num_steps=2)
    assert len(row["step_ms"]) == 2
    assert len(row["yardstick_ms"]) == 3
    assert min(row["first_ms"], *row["step_ms"], *row["yardstick_ms"]) > 0
    assert row["load"] >= 0


def test_the_time_of_a_case_is_the_median_over_all_rounds() -> None:
    rows = [{"what": "step times", "case": "a", "step_ms": times} for times in ([1.0, 9.0], [2.0, 3.0, 2.5])]
    assert median_times([*rows, {"what": "memory", "case": "a"}]) == {"a": 2.5}


def test_a_step_is_divided_by_how_much_longer_than_usual_its_yardstick_took() -> None:
    quiet = {"what": "step times", "case": "a", "step_ms": [100.0] * 3, "yardstick_ms": [10.0] * 4}
    slow = {"what": "step times", "case": "b", "step_ms": [300.0, 150.0], "yardstick_ms": [20.0, 20.0, 10.0]}
    rows = [{"what": "machine", "yardstick_ms": [11.0, 13.0]}, quiet, slow]
    assert paced_times(rows) == {"a": 100.0, "b": 125.0}
    assert describe_pace(rows) == {"median": 1.0, "worst": 2.0, "beside the probe": 1.2}


def test_other_estimators_answer_for_the_same_case(tiny: tuple[Case, Bench]) -> None:
    case, _ = tiny
    rows = {row["estimator"]: row for row in ask_all(case, measured_bytes=10**6)}
    assert abs(rows["torch MemTracker"]["error"]) < 0.05
    assert rows["4 x weights"]["predicted_bytes"] == 16 * case.spec.num_parameters
    assert rows["DeepSpeed ZeRO-3 formula"]["predicted_bytes"] == 18 * case.spec.num_parameters + 4 * (32 + 1) * 96
    if rows["accelerate estimate-memory"]["why_not"] is None:
        assert rows["accelerate estimate-memory"]["predicted_bytes"] == 16 * case.spec.num_parameters


def test_what_an_ordinary_loop_does_not_have_is_not_asked_of_memtracker(tiny: tuple[Case, Bench]) -> None:
    case = make_case("gpt2", "test", ("streamed",))
    row = next(ask_all(case, measured_bytes=1))
    assert (row["why_not"], row["error"]) == ("not expressible", None)


def memory_row(
    error: float, *, name: str = "a", held_back: bool = False, verdicts: Any = None, wrong: Any = None
) -> dict[str, Any]:
    return {
        "what": "memory",
        "case": name,
        "model": name,
        "techniques": [],
        "held_back": held_back,
        "error": error,
        "verdicts": verdicts or {"-1 B": "tight", "+2 %": "fits"},
        "wrong_categories": wrong or {},
        "stage_error_bytes": {},
    }


def test_errors_are_summed_up_by_size_and_apart_for_what_was_held_back() -> None:
    rows = [memory_row(error) for error in (0.0, -0.004, 0.0005)]
    summary = accuracy_summary.summarize([*rows, memory_row(0.02, held_back=True)])
    assert summary["device peak error, median"] == {"value": 0.00225, "goal": "<= 0.001", "met": False}
    assert summary["device peak error, worst"]["value"] == 0.02
    assert summary["device peak error, held back, median"]["value"] == 0.02


def test_a_wrong_fits_and_a_wrong_refusal_are_counted() -> None:
    rows = [
        memory_row(0.0, verdicts={"-1 %": "fits", "-1 B": "fits", "+0.5 %": "tight", "+2 %": "fits"}),
        memory_row(0.0, verdicts={"-1 %": "tight", "-1 B": "does_not_fit", "+0.5 %": "does_not_fit", "+2 %": "fits"}),
    ]
    summary = accuracy_summary.summarize(rows)
    assert summary["called fits under a budget that the peak exceeds"]["value"] == 2
    assert summary["called does not fit in a budget that the peak fits in"]["value"] == 1


def test_a_case_that_failed_and_too_few_cases_miss_their_goals() -> None:
    summary = accuracy_summary.summarize([memory_row(0.0), {"what": "failed"}])
    assert summary["rows that failed"] == {"value": 1, "goal": 0, "met": False}
    assert not summary["cases"]["met"]
    assert not summary["runs under the predicted bound that finished"]["met"]


def test_errors_are_tabulated_by_technique_with_the_sign_of_the_worst() -> None:
    rows = [
        {"techniques": ["bf16", "chunks"], "error": -0.03},
        {"techniques": ["bf16"], "error": 0.01},
        {"techniques": [], "error": 0.0},
    ]
    tables = accuracy_summary.tabulate_errors(rows, "techniques")
    assert tables["bf16"] == {"num_cases": 2, "median": 0.02, "worst": -0.03}
    assert tables["plain"]["num_cases"] == 1


def test_errors_against_the_clocks_own_times_are_kept_apart_too() -> None:
    rows = [{"held_back": held_back, "as_timed_error": error} for held_back, error in ((True, -0.2), (False, 0.1), (False, 0.3))]
    assert accuracy_summary.tabulate_as_timed(rows) == {
        "fitted": {"num_cases": 2, "median": 0.2, "worst": 0.3},
        "held back": {"num_cases": 1, "median": 0.2, "worst": -0.2},
    }


def test_a_run_that_was_cut_short_goes_on_where_it_stopped(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    first = Journal(file=None, lines=lines, machine={})
    first.do(lambda: {"value": 1}, what="memory", case="a")
    first.do(lambda: {"ms": 1 / 0}, what="memory", case="b")
    assert [row["what"] for row in first.rows] == ["memory", "failed"]
    lines.write_text(lines.read_text() + '{"what": "memory", "ca')
    second = Journal(file=tmp_path / "result.json", lines=lines, machine={})
    second.do(lambda: {"ms": 1 / 0}, what="memory", case="a")
    second.do(lambda: {"value": 2}, what="memory", case="b")
    assert [(row["case"], row["value"]) for row in second.rows] == [("a", 1), ("b", 2)]


def test_quick_takes_one_model_without_adapters(cases: list[Case]) -> None:
    quick = [case for case in cases if accuracy.is_wanted(case, None, quick=True)]
    assert {case.model for case in quick} == {"llama"}
    assert all(case.adapter is None for case in quick)
    assert any(case.is_timed for case in quick)


@pytest.mark.parametrize(("budget_s", "rounds"), [(-1.0, [0]), (1000.0, [0, 1, 2])])
def test_later_rounds_are_left_out_when_the_time_is_up(
    tiny: tuple[Case, Bench], budget_s: float, rounds: list[int]
) -> None:
    case, _ = tiny
    journal = Journal(file=None, machine={})
    measure_times(journal, [case], num_rounds=3, budget_s=budget_s)
    assert [row["round"] for row in journal.rows] == rounds
    steps = [ms for row in journal.rows for ms in row["step_ms"]]
    assert spreads(journal.rows) == {case.name: max(steps) / min(steps) - 1}
