"""A generation estimated from a config alone: traced by a child once, kept, and refused before that where it must be."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.api.estimate_generation import GenerationEstimate, estimate_model_generation
from optimizer.api.needs import needed_representations
from optimizer.base.errors import InvalidInput, InvalidModel, InvalidPlan, InvalidWorkload, NoFeasiblePlan
from optimizer.cli.main import main
from optimizer.cli.reports.generation import report_generation
from optimizer.goal import GenerationGoal
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.keep import obtain
from optimizer.runtime.job.measure_generation import measure_generation
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

SPEC = read_model_spec(SMALL_CONFIGS["llama"])
WORKLOAD = GenerationWorkload(prompt_length=8, num_new_tokens=6, num_sequences=4)
PLAN = GenerationPlan(batch_size=2, weights=WeightsPlan(frozen="int8"))


def estimate(
    folder: Path,
    *,
    spec: ModelSpec = SPEC,
    plan: GenerationPlan | str | None = PLAN,
    workload: GenerationWorkload = WORKLOAD,
    **options: Any,
) -> GenerationEstimate | None:
    return estimate_model_generation(
        spec, plan=plan, workload=workload, machine=make_cpu_machine(), profiles_folder=folder, **options
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Profiles of all tests that need not be the first to ask."""
    return tmp_path_factory.mktemp("profiles")


def test_a_config_is_traced_once_and_priced_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimated = estimate(tmp_path)
    measured = measure_generation(SPEC, plan=PLAN, workload=WORKLOAD)
    assert estimated.prediction.device_peak_bytes == measured.device_peak_bytes
    assert estimated.verdict == "fits"
    monkeypatch.setattr(obtain, "TracingChild", None)
    assert estimate(tmp_path).prediction == estimated.prediction


def test_the_verdict_is_about_the_budgets(folder: Path) -> None:
    estimated = estimate(folder, goal=GenerationGoal(device_budget_bytes=1000))
    assert estimated.verdict == "does_not_fit"
    text = report_generation(estimated)
    assert "Verdict: does not fit" in text
    assert "At the peak, prefill of block 3 of 3" in text
    streamed = GenerationPlan(weights=WeightsPlan(place="host"))
    nowhere = GenerationGoal(device_budget_bytes=2**30, host_budget_bytes=10)
    assert estimate(folder, plan=streamed, goal=nowhere).verdict == "does_not_fit"


def test_the_peak_and_the_lanes_are_explained(folder: Path) -> None:
    estimated = estimate(folder)
    prediction, explanation = estimated.prediction, estimated.explanation
    assert sum(row.peak_bytes for row in explanation.categories) == prediction.device_peak_bytes
    assert {row.category for row in explanation.categories} >= {"weights", "kv_cache", "activations"}
    assert explanation.lanes[0].busy_ms == prediction.lane_busy_ms["compute"]
    text = report_generation(estimated, is_explained=True)
    assert "Where a pass's time goes" in text
    assert "One token, as the cache grows" in text


def test_without_a_plan_the_best_stands_beside_resident_weights(folder: Path) -> None:
    found = estimate(folder, plan=None)
    assert [priced.label for priced in found.plans] == ["resident", "chosen"]
    assert found.priced.prediction.total_s <= found.plans[0].prediction.total_s
    alone = estimate(folder, plan="best")
    assert [priced.label for priced in alone.plans] == ["chosen"]
    assert estimate(folder, plan="one_at_a_time").priced.plan == GenerationPlan()


def test_where_nothing_fits_it_says_so_or_raises(folder: Path) -> None:
    goal = GenerationGoal(device_budget_bytes=1000)
    found = estimate(folder, plan=None, goal=goal)
    assert [priced.label for priced in found.plans] == ["resident"]
    assert "smallest feasible" in found.nothing_fits
    with pytest.raises(NoFeasiblePlan):
        estimate(folder, plan="best", goal=goal)


def test_a_label_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="plan 'hope' is not one of best, resident"):
        estimate(folder, plan="hope")


def test_only_what_the_question_needs_is_traced() -> None:
    goal = GenerationGoal(device_budget_bytes=1000)
    assert needed_representations(PLAN, goal=goal) == ["fp32/int8"]
    assert needed_representations("best", goal=goal) == ["fp32"]
    lossy = GenerationGoal(device_budget_bytes=1000, allow_lossy=True, forbid=("quantize_frozen",))
    assert needed_representations("best", goal=lossy) == ["bf16", "fp32"]
    assert needed_representations("resident", goal=goal, weights=WeightsPlan(dtype="fp16")) == ["bf16", "fp32"]


def test_what_is_wrong_is_refused_before_anything_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obtain, "TracingChild", None)
    with pytest.raises(InvalidPlan, match="batch size is 5"):
        estimate(tmp_path, plan=GenerationPlan(batch_size=5))
    with pytest.raises(InvalidWorkload, match="make 65 tokens"):
        estimate(tmp_path, workload=GenerationWorkload(prompt_length=60, num_new_tokens=5, num_sequences=2))


def test_the_command_asks_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADROOM_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SPEC.to_config()))
    (tmp_path / "machine.json").write_text(json.dumps(make_cpu_machine().to_json()))
    asked = ["estimate", "--model", str(tmp_path), "--machine", str(tmp_path / "machine.json"), "--batch", "2"]
    asked += ["--prompt-length", "8", "--new-tokens", "6", "--sequences", "4", "--pack", "int8"]
    assert main([*asked, "--json"]) == 0
    answered = json.loads(capsys.readouterr().out)
    assert answered["plan"] == PLAN.to_json()
    assert answered["prediction"] == estimate(tmp_path / "cache" / "profiles").prediction.to_json()
    assert [row["label"] for row in answered["plans"]] == ["given"]
    assert main([*asked, "--explain"]) == 0
    assert "Verdict: fits" in capsys.readouterr().out
    assert main([*asked, "--plan", "hope"]) == 2
    assert "is not one of best, resident" in capsys.readouterr().err
    assert main([*asked, "--plan", "keep_all"]) == 2
    assert "is not one of best, resident" in capsys.readouterr().err


def test_the_commands_find_the_best_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADROOM_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SPEC.to_config()))
    (tmp_path / "machine.json").write_text(json.dumps(make_cpu_machine().to_json()))
    asked = ["--model", str(tmp_path), "--machine", str(tmp_path / "machine.json"), "--sequences", "4"]
    asked += ["--prompt-length", "8", "--new-tokens", "6"]
    assert main(["estimate", *asked, "--plan", "best", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    assert main(["plan", *asked, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["chosen"]["plan"] == best["plan"]
    assert planned["gap"] == 0
    (tmp_path / "plan.json").write_text(json.dumps(planned))
    assert main(["estimate", *asked, "--plan", str(tmp_path / "plan.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == best["plan"]
    assert main(["plan", *asked, "--generate-for", "largest_batch"]) == 0
    text = capsys.readouterr().out
    assert "4 at once  <- chosen" in text
    assert "no plan that is allowed and fits is better" in text
    assert main(["plan", *asked, "--budget", "1000 B"]) == 2
    assert "Raise the budget to" in capsys.readouterr().err


def test_a_model_that_cannot_generate_is_refused_by_the_child(tmp_path: Path) -> None:
    spec = read_model_spec(SMALL_CONFIGS["headroom_decoder"])
    with pytest.raises(InvalidModel, match="layer_types holds linear"):
        estimate(tmp_path, spec=spec)
