"""The benchmark of training runs here on shapes small enough for a test; what it compares takes the same steps."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.alternatives import Job, Ours, build_quickly, gradients_in_favour_bytes, list_alternatives
from benchmarks.common.paired import measure_peak, paired_ratio, race
from benchmarks.common.record import Record
from benchmarks.training import cards as training_cards
from benchmarks.training import command as training
from benchmarks.training.command import Bench
from benchmarks.training.head import HeadShape
from benchmarks.training.plans import TECHNIQUES, describe, make_plan
from optimizer.base.errors import InvalidModel
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.workload import Adapter, TrainingWorkload
from tests.breadth import TRAINING_BENCHMARK

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
SPEC = read_model_spec(CONFIG)
WORKLOAD = TrainingWorkload(sequence_length=32, global_batch_size=4, learning_rate=1e-3)
JOB = Job(spec=SPEC, workload=WORKLOAD, device=CPU)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bench() -> Bench:
    setup = training.Setup(
        spec=SPEC,
        workload=WORKLOAD,
        num_rounds=1,
        deep_spec=read_model_spec({**CONFIG, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 8}),
        head=HeadShape(num_tokens=128, width=32, vocabulary=4096, num_pairs=1),
        probe_s=0.1,
    )
    return training.Bench(setup)


def losses_of(make: Callable[..., Any]) -> list[float]:
    contender = make(None)
    try:
        return [contender.step() for _ in range(3)]
    finally:
        contender.close()


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    return losses_of(lambda meter: Ours(JOB, make_plan(SPEC, WORKLOAD), meter))


RUNNING = [name for name, _ in list_alternatives(JOB) if not name.startswith(("torchao", "DeepSpeed"))]


@pytest.mark.breadth(TRAINING_BENCHMARK)
@pytest.mark.parametrize("name", RUNNING)
def test_every_alternative_takes_the_steps_that_ours_takes(name: str, plain_losses: list[float]) -> None:
    found = losses_of(dict(list_alternatives(JOB))[name])
    assert found == pytest.approx(plain_losses, rel=1e-5)


def test_alternatives_save_what_they_say_they_save() -> None:
    alternatives = dict(list_alternatives(JOB))
    peaks = {name: measure_peak(alternatives[name], CPU)["peak_bytes"] for name in RUNNING}
    plain_bytes = peaks.pop("transformers")
    assert all(peak < plain_bytes for peak in peaks.values())


def test_what_fsdp_keeps_on_the_host_is_not_on_the_device() -> None:
    alternatives = dict(list_alternatives(JOB))
    measured = measure_peak(alternatives["FSDP2 CPUOffloadPolicy"], CPU)
    weights_bytes = 4 * SPEC.num_parameters
    assert measured["host_peak_bytes"] >= 3 * weights_bytes
    sharded = alternatives["FSDP2 CPUOffloadPolicy"](None)
    assert gradients_in_favour_bytes(sharded, CPU) == weights_bytes


def test_an_alternative_that_does_not_run_here_says_why(bench: Bench) -> None:
    assert "CUDA" in str(bench.alternative_peaks["torchao CPUOffloadOptimizer"])
    assert "DeepSpeed" in str(bench.alternative_peaks["DeepSpeed ZeRO-Offload"])


@pytest.mark.breadth(TRAINING_BENCHMARK)
def test_the_head_in_chunks_is_priced_to_the_byte_and_keeps_the_gradient(bench: Bench) -> None:
    rows = list(training.PARTS["head"](bench))
    assert [row["num_chunks"] for row in rows] == [1, 8]
    for row in rows:
        assert abs(row["predicted_peak_bytes"] - row["peak_bytes"]) <= 16
        assert row["gradient_distance"] <= 2e-6
    assert rows[1]["peak_falls_by"] > 4


@pytest.mark.breadth(TRAINING_BENCHMARK)
def test_a_budget_is_met_and_held_against_all_that_fits_in_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SHARES", (0.8,))
    (row,) = training.PARTS["budgets"](bench)
    assert row["finished"]
    assert row["peak_bytes"] <= row["budget_bytes"]
    assert row["best_in_budget"] in bench.alternatives
    assert row["ours_over_best_in_budget"] > 0


def test_a_technique_that_fails_is_reported_and_the_next_still_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    techniques = {
        "accumulate": {"cut": 4},
        "nonsense": {"weights": {"prefetch": 99}},
        "loss in chunks": {"num_chunks": 8},
    }
    monkeypatch.setattr(training, "TECHNIQUES", techniques)
    rows = list(training.PARTS["techniques"](bench))
    assert [row["what"] for row in rows] == ["technique", "failed", "technique"]
    assert "prefetch is 99" in rows[1]["error"]
    for row in (rows[0], rows[2]):
        assert abs(row["predicted_peak_bytes"] - row["peak_bytes"]) <= 16


@pytest.mark.breadth(TRAINING_BENCHMARK)
def test_models_of_four_times_the_budget_train_to_the_bits_of_plain_training(bench: Bench) -> None:
    rows = list(training.PARTS["larger"](bench))
    assert [row["state_and_weights_on"] for row in rows] == ["host", "disk"]
    for row in rows:
        assert row["static_over_budget"] >= 4
        assert row["peak_bytes"] <= row["budget_bytes"]
        assert row["trains"]
        assert row["losses_equal_plain"]
    assert rows[1]["disk_peak_bytes"] > 0


def test_steps_are_taken_in_turn_and_in_reverse_order_every_second_round() -> None:
    taken = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def step(self) -> float:
            taken.append(self.name)
            return 0.0

        def close(self) -> None:
            taken.append(f"{self.name} closed")

    times = race({"a": lambda meter: Noted("a"), "b": lambda meter: Noted("b")}, num_rounds=2)
    assert taken == ["a", "b", "a", "b", "b", "a", "a closed", "b closed"]
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2}


def test_a_ratio_is_the_median_of_pairs() -> None:
    assert paired_ratio([2.0, 3.0, 8.0], [1.0, 1.0, 1.0]) == 3.0


def test_the_record_is_written_after_every_row_and_reports_what_broke(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"what": "technique", "name": "keep"}
        assert len(json.loads(file.read_text())["rows"]) == 1
        raise RuntimeError("the card fell over")

    file = tmp_path / "result.json"
    record = Record(file=file, machine={})
    record.add_all("techniques", rows())
    assert record.finish(training.summarize(record.rows)) == 1
    written = json.loads(file.read_text())
    assert written.keys() == {"machine", "rows", "summary"}
    assert written["rows"][1]["error"] == "RuntimeError: the card fell over"
    assert not any(entry["met"] for entry in written["summary"].values())


def test_weights_drawn_quickly_are_finite_different_and_train() -> None:
    workload = replace(WORKLOAD, adapter=Adapter(rank=2))
    model = build_quickly(SPEC, weights=WeightsPlan(), workload=workload, device=CPU)
    matrices = [p for p in model.parameters() if p.dim() >= 2 and not p.requires_grad]
    assert all(bool(p.isfinite().all()) and p.std() > 0.01 for p in matrices)
    found = losses_of(lambda meter: Ours(replace(JOB, draws_quickly=True), make_plan(SPEC, WORKLOAD), meter))
    assert found[-1] < found[0]


def test_weights_drawn_quickly_are_tied_where_the_model_ties_them() -> None:
    spec = read_model_spec({**CONFIG, "tie_word_embeddings": True})
    model = build_quickly(spec, weights=WeightsPlan(), workload=WORKLOAD, device=CPU)
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters


@pytest.mark.breadth(TRAINING_BENCHMARK)
def test_the_cases_of_cards_run_on_the_cpu_device_on_small_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = [pair for pair in list_alternatives(JOB) if pair[0] in ("transformers", "torchao CPUOffloadOptimizer")]
    monkeypatch.setattr(training_cards, "list_alternatives", lambda job: two)

    def profile_without_adapters(spec: ModelSpec, *, adapter: Adapter | None) -> Profile | None:
        if adapter is not None:
            raise InvalidModel("adapters are not traced here", field="config")
        return profile_model(spec)

    monkeypatch.setattr(training_cards, "profile_model", profile_without_adapters)
    lora = replace(WORKLOAD, adapter=Adapter(rank=2))
    cases = [
        training_cards.Case(
            name=name,
            spec=SPEC,
            cap_bytes=cap_bytes,
            workload=workload,
            by_hand=training_cards.streamed_plan(SPEC, workload, micro_batch_size=1),
            has_alternatives=workload is WORKLOAD,
        )
        for name, workload, cap_bytes in (("adapters", lora, 2**20), ("all weights", WORKLOAD, 2**20))
    ]
    cards = training_cards.Cards(
        cases=tuple(cases), offload_spec=SPEC, offload_workload=WORKLOAD, num_steps=1, probe_s=0.1
    )
    record = Record(file=tmp_path / "cards.json", machine={})
    training_cards.measure_cards(record, CPU, quick=False, cards=cards)
    assert [row.get("traceback") for row in record.rows if row["what"] == "failed"] == []
    finished = [row["name"] for row in record.rows if row["what"] == "card" and row["finished"]]
    assert finished == ["adapters", "all weights"]
    sources = [(row["name"], row["plan_from"], row["finished"]) for row in record.rows if row["what"] == "card"]
    assert sources == [("adapters", "search", False), ("adapters", "hand", True), ("all weights", "search", True)]
    summary = training_cards.summarize_cards(record.rows)
    assert summary["models trained under their card's cap"]["met"]
    assert summary["speed with the optimizer on the host"]["value"] > 0


def test_the_cards_cases_are_plans_that_hold_for_their_models() -> None:
    for case in training_cards.cuda_cards().cases:
        case.by_hand.check(num_blocks=case.spec.num_blocks, workload=case.workload)
    caps = [case.cap_bytes // 2**30 for case in training_cards.cuda_cards().cases]
    assert caps == [8, 12, 16, 24]


def test_every_technique_is_a_plan_that_can_be_described() -> None:
    words = set()
    for changes in itertools.islice(TECHNIQUES.values(), 20):
        words.add(describe(make_plan(SPEC, WORKLOAD, **changes)))
    assert len(words) == 20
