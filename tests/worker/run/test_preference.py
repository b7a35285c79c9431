"""A small job on pairs through the attempt's own process: profiled, planned, trained within its price."""

import json
from pathlib import Path

from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload
from tests.webapp.conftest import MACHINE_DOCUMENT
from tests.worker.run.test_adapters import CONFIG, run_in_folder, train_within


def test_the_job_trains_within_its_price_and_leaves_a_model(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    asked = {"kind": "profile", "config": CONFIG, "objective": "orpo", "profile_file": str(file)}
    ended = run_in_folder(tmp_path / "profile", asked)
    assert ended.returncode == 0, ended.stderr
    profile = Profile.from_json(json.loads(file.read_text()))
    workload = TrainingWorkload(
        sequence_length=32,
        global_batch_size=2,
        num_steps=3,
        sample_tokens=0,
        eval_batches=1,
        packing="off",
        loss_on="assistant",
        objective="orpo",
    )
    plan = Plan(
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=2),
        activations=ActivationsPlan(per_block=("recompute", "offload")),
    )
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=Machine.from_json(MACHINE_DOCUMENT))
    dataset = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{number}?", "chosen": f"yes {number}", "rejected": f"no {number}"} for number in range(6)]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = train_within(tmp_path, dataset, format="jsonl", workload=workload, plan=plan, predicted=predicted)
    assert abs(result["measured"]["device_peak_bytes"] - predicted.device_peak_bytes) <= 16
    assert "model" in {artifact["kind"] for artifact in result["artifacts"]}
