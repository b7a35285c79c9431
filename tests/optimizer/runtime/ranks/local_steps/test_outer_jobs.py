"""Whole jobs of ranks that take steps alone: what they leave, when they stop, and checkpoints of any layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optimizer.estimate.categories.tensors import list_tensors
from optimizer.estimate.job.files import estimate_checkpoint_bytes
from optimizer.models.spec import read_model_spec
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.plan import Plan
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.ranks.cases import MODELS
from tests.optimizer.runtime.ranks.conftest import answers_of
from tests.optimizer.runtime.ranks.test_train import make_rank_plan, run_job
from tests.optimizer.runtime.tiny import artifacts_of, make_workload

__all__ = ["run_job"]
RunJob = Callable[..., list[dict[str, Any]]]


def make_local_plan(sync_every: int, *, num_ranks: int = 2, sync_format: str = "fp32", **changes: Any) -> Plan:
    plan = make_rank_plan(num_ranks, **changes)
    return replace(plan, layout=DeviceLayout(num_devices=num_ranks, sync_every=sync_every, sync_format=sync_format))


def steps_of(answer: dict[str, Any], kind: str) -> list[int]:
    return [message["step"] for message in answer["messages"] if message.get("kind") == kind or message["type"] == kind]


TWO = {"global_batch_size": 2, "checkpoint_every_steps": 2, "eval_every_steps": 2, "num_steps": 8}


def test_what_is_due_waits_until_all_have_the_same_weights(run_job: RunJob, tmp_path: Path) -> None:
    first, second = answers_of(run_job(make_local_plan(3), job="job", workload=TWO))
    assert steps_of(first, "checkpoint") == [3, 6, 8]
    assert steps_of(first, "eval") == [0, 3, 6, 8]
    assert first["result"]["summary"]["weights_sha256"] is not None
    assert first["result"]["summary"]["validation_loss"] == second["result"]["summary"]["validation_loss"]
    # The last weights are those of all, after two steps alone: what the model's file has is what the last checkpoint has.
    exported = load_file(artifacts_of(tmp_path / "job") / "model" / "model.safetensors")
    stored = load_file(tmp_path / "job" / "checkpoints" / "step-000008-f1" / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)
    assert first["result"]["measured"]["rank_peak_bytes"] == second["result"]["measured"]["rank_peak_bytes"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_that_stops_and_goes_on_ends_with_the_same_bits(run_job: RunJob, dtype: str) -> None:
    plan = make_local_plan(2, sync_format="int8", dtype=dtype)
    whole, _ = answers_of(run_job(plan, job="whole", workload={**TWO, "eval_every_steps": 0}))
    stopped, _ = answers_of(run_job(plan, job="cut", workload={**TWO, "eval_every_steps": 0}, stops_before_step=3))
    assert stopped["result"]["outcome"] == "drained"
    assert stopped["result"]["step"] == 4
    resumed, _ = answers_of(
        run_job(plan, job="cut", workload={**TWO, "eval_every_steps": 0}, resume_from="newest", attempt=2)
    )
    assert resumed["result"]["summary"]["weights_sha256"] == whole["result"]["summary"]["weights_sha256"]


@pytest.mark.breadth
@pytest.mark.parametrize(
    "layout",
    [DeviceLayout(), DeviceLayout(num_devices=2, data="zero1"), DeviceLayout(num_devices=2, sync_every=4)],
    ids=["one", "zero1", "alone"],
)
def test_a_checkpoint_goes_on_under_any_layout(run_job: RunJob, layout: DeviceLayout) -> None:
    here = {**TWO, "num_steps": 4, "eval_every_steps": 0, "checkpoint_every_steps": 4}
    local = make_local_plan(4)
    other = replace(make_rank_plan(layout.num_devices, accumulation_steps=2 // layout.num_devices), layout=layout)
    answers_of(run_job(local, job="local", workload=here))
    answers_of(run_job(other, job="other", workload=here))
    longer = {**here, "num_steps": 8}
    there = answers_of(run_job(other, job="local", workload=longer, resume_from="newest", attempt=2))[0]
    back = answers_of(run_job(local, job="other", workload=longer, resume_from="newest", attempt=2))[0]
    for done in (there, back):
        assert done["messages"][0]["type"] == "phase"
        assert done["result"]["step"] == 8
        assert steps_of(done, "step") == [5, 6, 7, 8]
        assert done["result"]["summary"]["validation_loss"] < done["result"]["summary"]["validation_loss_start"]


def test_a_checkpoint_takes_the_bytes_that_were_predicted(run_job: RunJob, tmp_path: Path) -> None:
    plan = make_local_plan(2, num_ranks=2)
    answers_of(run_job(plan, job="job", workload={**TWO, "num_steps": 4}))
    folder = tmp_path / "job" / "checkpoints" / "step-000004-f1"
    found_bytes = sum(file.stat().st_size for file in folder.iterdir())
    workload = make_workload(**{**TWO, "num_steps": 4})
    profile = trace(read_model_spec(MODELS["decoder"]), extent=extent_of([(plan, workload)]))
    predicted = estimate_checkpoint_bytes(list_tensors(profile), plan=plan, workload=workload)
    assert found_bytes == pytest.approx(predicted, rel=0.03)
