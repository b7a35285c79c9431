"""A small job that trains adapters, through the attempt's own process: profiled, planned, trained, saved."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from headroom.commands.submit import read_job_file
from optimizer.base.serialize import to_json
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.workload import Adapter, TrainingWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.tiny import artifacts_of, write_tokenizer
from tests.webapp.conftest import MACHINE_DOCUMENT
from worker.attempt import read_result
from worker.run.child import child_environment, isolated_command

CONFIG: dict[str, Any] = {**SMALL_CONFIGS["llama"], "vocab_size": 512, "num_hidden_layers": 2}
ADAPTER = Adapter(rank=2, targets=("q_proj", "down_proj"))


def run_in_folder(folder: Path, attempt: dict[str, Any]) -> subprocess.CompletedProcess[Any]:
    folder.mkdir()
    (folder / "attempt.json").write_text(json.dumps({"job_id": "job_1", "attempt": 1, "fence": 1, "device": "cpu", **attempt}))
    return subprocess.run(
        isolated_command("worker.run.runner", str(folder)),
        cwd=folder,
        env={**child_environment({"PATH": os.environ["PATH"]}, folder=folder), "HEADROOM_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def train_within(
    folder: Path,
    dataset: Path,
    *,
    format: str,
    workload: TrainingWorkload,
    plan: Plan,
    predicted: Prediction,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The result of a job whose budget is what was promised, and the losses of a step. more: fields of the attempt's file."""
    attempt = {
        "kind": "train",
        "config": CONFIG,
        "model_folder": str(folder),
        "weights_folder": None,
        "linked_files": [],
        "tokenizer_file": str(write_tokenizer(folder / "tokenizer.json")),
        "dataset": {"file": str(dataset), "format": format},
        "tokens_folder": str(folder / "tokens"),
        "workload": to_json(workload),
        "goal": to_json(Goal(device_budget_bytes=predicted.device_peak_bytes + 1024)),
        "plan": plan.to_json(),
        "prediction": predicted.to_json(),
        "job_folder": str(folder / "job"),
        "resume_from": None,
        "earlier_job_folders": [],
        **(more or {}),
    }
    ended = run_in_folder(folder / "attempt", attempt)
    assert ended.returncode == 0, ended.stderr
    result = read_result(folder / "attempt")
    assert result["outcome"] == "succeeded"
    return result


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("profile") / "attempt"
    file = folder / "profile.json"
    attempt = {"kind": "profile", "config": CONFIG, "adapter": to_json(ADAPTER), "profile_file": str(file)}
    ended = run_in_folder(folder, attempt)
    assert ended.returncode == 0, ended.stderr
    return Profile.from_json(json.loads(file.read_text()))


def test_the_model_with_adapters_is_profiled_in_every_form_of_its_frozen_weights(profile: Profile) -> None:
    assert set(profile.frozen) == set(profile.regimes)
    assert set(profile.frozen) >= {f"{dtype}{form}" for dtype in ("fp32", "bf16") for form in ("", "/int8", "/nf4")}


def test_the_job_trains_within_its_price_and_leaves_adapters_that_can_be_read(profile: Profile, tmp_path: Path) -> None:
    workload = TrainingWorkload(
        sequence_length=32, global_batch_size=2, num_steps=3, sample_tokens=0, eval_batches=1, adapter=ADAPTER
    )
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=1),
        weights=WeightsPlan(frozen="nf4"),
        activations=ActivationsPlan(per_block=("recompute", "offload")),
    )
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=Machine.from_json(MACHINE_DOCUMENT))
    dataset = tmp_path / "text.txt"
    dataset.write_text("In the beginning God created the heaven and the earth.\n" * 40)
    result = train_within(tmp_path, dataset, format="txt", workload=workload, plan=plan, predicted=predicted)
    assert abs(result["measured"]["device_peak_bytes"] - predicted.device_peak_bytes) <= 16
    assert {artifact["kind"] for artifact in result["artifacts"]} == {"model", "adapter"}
    job_folder = tmp_path / "job"
    for artifact in result["artifacts"]:
        assert (job_folder / artifact["file"]).stat().st_size == artifact["num_bytes"]
    adapters = load_file(artifacts_of(job_folder) / "adapter" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 2 * 2


def test_a_job_file_may_write_the_numbers_of_adapters_as_people_do(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: m\nworkload: {learning_rate: 1e-3, adapter: {rank: 4, alpha: 1e1, targets: [q_proj]}}\n")
    workload = read_job_file(file)["workload"]
    assert workload == {"learning_rate": 1e-3, "adapter": {"rank": 4, "alpha": 10.0, "targets": ["q_proj"]}}
