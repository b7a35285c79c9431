"""Whole jobs of ranks that share each block: the files of one device, and checkpoints that go on under any layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.common.machines import make_cpu_machine
from optimizer.estimate.job.stages import list_stages
from optimizer.estimate.step.setting import lay_out
from optimizer.estimate.training import estimate_training
from optimizer.models.spec import read_model_spec
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.plan import Plan
from optimizer.workload import Adapter
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.ranks.cases import MODELS
from tests.optimizer.runtime.ranks.conftest import answers_of
from tests.optimizer.runtime.ranks.test_train import TUNED, assert_close, make_rank_plan, run_job, weights_of
from tests.optimizer.runtime.tiny import artifacts_of, make_workload

__all__ = ["run_job"]
RunJob = Callable[..., list[dict[str, Any]]]
WORK: dict[str, Any] = {"global_batch_size": 2, "checkpoint_every_steps": 2, "eval_every_steps": 2}


def make_shared_plan(*, num_ranks: int = 2, accumulation_steps: int = 2, **changes: Any) -> Plan:
    plan = make_rank_plan(1, accumulation_steps=accumulation_steps, **changes)
    return replace(plan, layout=DeviceLayout(num_devices=num_ranks, tensor=num_ranks))


def test_a_job_whose_ranks_share_blocks_leaves_the_files_of_one_device(run_job: RunJob, tmp_path: Path) -> None:
    (one,) = answers_of(run_job(make_rank_plan(1, accumulation_steps=2), job="one", workload=WORK))
    first, second = answers_of(run_job(make_shared_plan(), job="two", workload=WORK))
    for key in ("loss", "validation_loss", "validation_loss_start"):
        assert first["result"]["summary"][key] == pytest.approx(one["result"]["summary"][key], rel=1e-6), key
    assert [each["file"] for each in first["result"]["artifacts"]] == [each["file"] for each in one["result"]["artifacts"]]
    assert second["messages"] == []
    assert second["result"]["artifacts"] == []
    assert_close(weights_of(tmp_path / "two"), weights_of(tmp_path / "one"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        one_file, two_file = (load_file(tmp_path / job / "checkpoints" / "step-000002-f1" / name) for job in ("one", "two"))
        assert two_file.keys() == one_file.keys()
        for key, tensor in one_file.items():
            torch.testing.assert_close(two_file[key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (make_shared_plan(), make_rank_plan(1, accumulation_steps=2)),
        (make_rank_plan(1, accumulation_steps=2), make_shared_plan()),
        (make_shared_plan(gradients="host", state_place="host"), make_rank_plan(2, "zero3")),
        (make_rank_plan(2, "zero1"), make_shared_plan(gradients="host", state_place="host", weights_place="host")),
        (make_shared_plan(), make_shared_plan()),
    ],
    ids=["to-one-device", "from-one-device", "to-zero3", "from-zero1", "the-same"],
)
def test_a_checkpoint_goes_on_under_another_layout_to_the_same_weights(
    run_job: RunJob, tmp_path: Path, before: Plan, after: Plan
) -> None:
    answers_of(run_job(make_rank_plan(1, accumulation_steps=2), job="whole", workload=WORK))
    stopped = answers_of(run_job(before, job="job", workload=WORK, stops_before_step=3))
    assert [done["result"]["outcome"] for done in stopped] == ["drained"] * before.layout.num_devices
    went_on = answers_of(run_job(after, job="job", workload=WORK, resume_from="newest", attempt=2))
    assert went_on[0]["messages"][1]["resumed_from_step"] == 2
    assert_close(weights_of(tmp_path / "job"), weights_of(tmp_path / "whole"))


@pytest.mark.parametrize("place", ["device", "host"])
def test_adapters_are_trained_and_left_as_on_one_device(run_job: RunJob, tmp_path: Path, place: str) -> None:
    answers_of(run_job(make_rank_plan(1, accumulation_steps=4), job="base", workload={"num_steps": 1}))
    for job, plan in (("one", make_rank_plan(1, accumulation_steps=2)), ("two", make_shared_plan())):
        streamed = replace(plan, weights=replace(plan.weights, place=place))
        answers_of(run_job(streamed, job=job, **TUNED))
    for name in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        one, two = (load_file(artifacts_of(tmp_path / job) / name) for job in ("one", "two"))
        assert_close(two, one)
    # Checkpoints of either name the same frozen weights.
    answers_of(run_job(make_shared_plan(), job="stopped", stops_before_step=3, **TUNED))
    answers_of(
        run_job(make_rank_plan(1, accumulation_steps=2), job="stopped", resume_from="newest", attempt=2, **TUNED)
    )
    assert_close(
        load_file(artifacts_of(tmp_path / "stopped") / "adapter" / "adapter_model.safetensors"),
        load_file(artifacts_of(tmp_path / "one") / "adapter" / "adapter_model.safetensors"),
    )


def test_more_ranks_than_heads_of_keys_are_refused_with_their_numbers(run_job: RunJob) -> None:
    replies = run_job(make_shared_plan(num_ranks=4), job="job", workload=WORK)
    assert [reply["error"]["message"] for reply in replies] == [
        "plan.layout.tensor is 4; the model has 2 heads of keys (num_key_value_heads), which 4 devices cannot share equally"
    ] * 4


def test_a_model_whose_blocks_cannot_be_shared_is_refused_by_its_type(run_job: RunJob) -> None:
    replies = run_job(make_shared_plan(), job="job", model="gpt2", workload=WORK)
    assert {reply["error"]["code"] for reply in replies} == {"invalid_plan"}
    assert replies[0]["error"]["message"].startswith("plan.layout.tensor is 2; blocks of gpt2 cannot be shared by devices")


@pytest.mark.parametrize("adapter", [None, Adapter(rank=4)], ids=["whole", "adapters"])
def test_the_stages_of_each_rank_take_the_bytes_predicted(run_job: RunJob, adapter: Adapter | None) -> None:
    answers_of(run_job(make_rank_plan(1, accumulation_steps=4), job="base"))
    changes: dict[str, Any] = {"mode": "finetune", "global_batch_size": 2, "checkpoint_every_steps": 2}
    given = {**changes, "adapter": None if adapter is None else {"rank": 4}}
    plan = make_shared_plan()
    done = answers_of(run_job(plan, job="job", weights="base/artifacts/f1/model", workload=given))
    workload = make_workload(**{**changes, "adapter": adapter, "num_steps": 4, "eval_batches": 2})
    extent = extent_of([(plan, workload)])
    profile = trace(read_model_spec(MODELS["decoder"]), extent=extent, adapter=adapter, num_sharing=2)
    here: dict[str, Any] = {"plan": plan, "workload": workload, "machine": replace(make_cpu_machine(), num_threads=2)}
    predicted = list_stages(estimate_training(profile, **here), profile, lay_out(profile, **here), **here)
    for answer in done:
        measured = answer["result"]["measured"]["stages"]
        for stage in predicted:
            if stage.stage in ("load", "first_step", "steady_step", "evaluation"):
                assert measured[stage.stage]["device_peak_bytes"] == stage.device_peak_bytes, stage.stage
                assert measured[stage.stage]["host_peak_bytes"] == stage.host_peak_bytes, stage.stage
    # Rank 0 writes whole tensors, and joins each for a moment; the random states of others, some KiB, are not counted.
    measured = done[0]["result"]["measured"]["stages"]
    for stage in predicted:
        if stage.stage in ("save", "merge", "export"):
            found = measured[stage.stage]
            assert found["host_peak_bytes"] == pytest.approx(stage.host_peak_bytes, rel=0.02, abs=2**14), stage.stage
            assert found["disk_peak_bytes"] == pytest.approx(stage.disk_peak_bytes, rel=0.05), stage.stage
