"""A small job with compiled blocks through the attempt's own process: profiled, priced, run twice with the same kernels."""

import json
from pathlib import Path

import pytest

from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import ActivationsPlan, KernelsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload
from tests.breadth import COMPILED_BLOCKS
from tests.webapp.conftest import MACHINE_DOCUMENT
from tests.worker.run.test_adapters import CONFIG, run_in_folder, train_within
from worker.attempt import read_result

pytestmark = pytest.mark.breadth(COMPILED_BLOCKS)

WORKLOAD = TrainingWorkload(sequence_length=32, global_batch_size=2, num_steps=3, sample_tokens=0, eval_batches=1)
PLAN = Plan(
    batch=BatchPlan(micro_batch_size=2, accumulation_steps=1),
    activations=ActivationsPlan(per_block=("recompute", "offload")),
    kernels=KernelsPlan(blocks="compiled"),
)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("profile") / "attempt"
    file = folder / "profile.json"
    ended = run_in_folder(folder, {"kind": "profile", "config": CONFIG, "compiled": ["fp32"], "profile_file": str(file)})
    assert ended.returncode == 0, ended.stderr
    return Profile.from_json(json.loads(file.read_text()))


def test_the_profile_holds_all_of_an_ordinary_one_and_the_compiled_blocks(profile: Profile) -> None:
    assert list(profile.regimes) == ["fp32", "bf16", "fp32+bf16", "fp32@compiled"]
    assert not profile.is_partial


def test_the_peak_is_the_predicted_one_and_a_second_attempt_compiles_no_kernel(profile: Profile, tmp_path: Path) -> None:
    predicted = estimate_training(profile, plan=PLAN, workload=WORKLOAD, machine=Machine.from_json(MACHINE_DOCUMENT))
    dataset, kernels = tmp_path / "text.txt", tmp_path / "kernels"
    dataset.write_text("In the beginning God created the heaven and the earth.\n" * 40)
    libraries = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        result = train_within(
            folder,
            dataset,
            format="txt",
            workload=WORKLOAD,
            plan=PLAN,
            predicted=predicted,
            more={"kernels_folder": str(kernels)},
        )
        assert result["measured"]["device_peak_bytes"] == predicted.device_peak_bytes
        assert not (folder / "attempt" / ".cache" / "headroom" / "compiled").exists()
        libraries.append({file: file.stat().st_mtime_ns for file in kernels.rglob("*.so")})
    assert libraries[0]
    assert libraries[1] == libraries[0]


def test_without_a_compiler_the_profile_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "attempt"
    file = folder / "profile.json"
    ended = run_in_folder(folder, {"kind": "profile", "config": CONFIG, "compiled": ["fp32"], "profile_file": str(file)})
    result = read_result(folder)
    assert ended.returncode == 1
    assert (result["reason"], result["error"]["code"]) == ("bad_model", "block_not_compiled")
    assert "LlamaDecoderLayer cannot be compiled" in result["message"]
    assert "C++ compiler (g++)" in result["error"]["hint"]
    assert not file.exists()
