"""A generation estimated from a config alone: traced by a child once, kept, and refused before that where it must be."""

import json

import pytest

from optimizer.cli import main
from optimizer.errors import InvalidModel, InvalidPlan, InvalidWorkload
from optimizer.estimating_generation import estimate_generation, report_generation
from optimizer.models.spec import read_model_spec
from optimizer.plan.inference import InferencePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile import obtain
from optimizer.runtime.measure_inference import measure_generation
from optimizer.workload import InferenceWorkload
from tests.optimizer.machines import make_cpu_machine
from tests.optimizer.models.small_configs import SMALL_CONFIGS

SPEC = read_model_spec(SMALL_CONFIGS["llama"])
WORKLOAD = InferenceWorkload(prompt_length=8, num_new_tokens=6, num_sequences=4)
PLAN = InferencePlan(batch_size=2, weights=WeightsPlan(frozen="int8"))


def estimate(folder, *, spec=SPEC, plan=PLAN, workload=WORKLOAD, **options):
    return estimate_generation(
        spec, plan=plan, workload=workload, machine=make_cpu_machine(), profiles_folder=folder, **options
    )


def test_a_config_is_traced_once_and_priced_to_the_byte(tmp_path, monkeypatch):
    estimated = estimate(tmp_path)
    measured = measure_generation(SPEC, plan=PLAN, workload=WORKLOAD)
    assert estimated.prediction.device_peak_bytes == measured.device_peak_bytes
    assert estimated.verdict == "fits"
    monkeypatch.setattr(obtain, "_Child", None)
    assert estimate(tmp_path).prediction == estimated.prediction


def test_the_verdict_is_about_the_budget(tmp_path):
    estimated = estimate(tmp_path, budget_bytes=1000)
    assert estimated.verdict == "does_not_fit"
    lines = report_generation(estimated).splitlines()
    assert lines[0] == "test: does not fit in 1000 B"
    assert "  weights" in "\n".join(lines)
    assert lines[-1].startswith("- the peak of ")


def test_what_is_wrong_is_refused_before_anything_is_traced(tmp_path, monkeypatch):
    monkeypatch.setattr(obtain, "_Child", None)
    with pytest.raises(InvalidPlan, match="plan.batch_size is 5"):
        estimate(tmp_path, plan=InferencePlan(batch_size=5))
    with pytest.raises(InvalidWorkload, match="make 65 tokens"):
        estimate(tmp_path, workload=InferenceWorkload(prompt_length=60, num_new_tokens=5, num_sequences=2))


def test_the_command_asks_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEADROOM_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SPEC.to_config()))
    (tmp_path / "machine.json").write_text(json.dumps(make_cpu_machine().to_json()))
    asked = ["estimate", "--model", str(tmp_path), "--machine", str(tmp_path / "machine.json"), "--batch", "2"]
    asked += ["--prompt-length", "8", "--new-tokens", "6", "--sequences", "4", "--pack", "int8"]
    assert main([*asked, "--json"]) == 0
    answered = json.loads(capsys.readouterr().out)
    assert answered["plan"] == PLAN.to_json()
    assert answered["prediction"] == estimate(tmp_path / "cache" / "profiles").prediction.to_json()
    assert main(asked) == 0
    assert "test: fits in 16.0 GiB" in capsys.readouterr().out
    assert main([*asked, "--plan", "best"]) == 2
    assert "is a plan to train" in capsys.readouterr().err


def test_a_model_that_cannot_generate_is_refused_by_the_child(tmp_path):
    spec = read_model_spec(SMALL_CONFIGS["headroom_decoder"])
    with pytest.raises(InvalidModel, match="layer_types holds linear"):
        estimate(tmp_path, spec=spec)
