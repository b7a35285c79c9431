"""Whole jobs of a model that is cut: the files of one device, and checkpoints that go on under any layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.api.plan import plan_profiled
from optimizer.base.units import format_bytes
from optimizer.estimate.training import estimate_training
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.mixed import play_devices
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.pins.training import read_pins
from optimizer.plan.plan import Plan
from optimizer.profile.extent import Extent
from tests.optimizer.profiles import trace
from tests.optimizer.runtime.ranks.cases import MODELS
from tests.optimizer.runtime.ranks.conftest import answers_of
from tests.optimizer.runtime.ranks.test_train import TUNED, make_rank_plan, run_job, weights_of
from tests.optimizer.runtime.tiny import make_workload

__all__ = ["run_job"]
RunJob = Callable[..., list[dict[str, Any]]]
WORK: dict[str, Any] = {"global_batch_size": 4, "eval_every_steps": 2}
FORBID: Any = ("offload", "offload_gradients", "offload_optimizer", "stream_weights", "disk", "chunked_loss", "shard_state")
TWO_STEPS = {"global_batch_size": 2, "checkpoint_every_steps": 2, "eval_every_steps": 2}


def make_cut_plan(*cut: int, accumulation_steps: int = 2, **changes: Any) -> Plan:
    plan = make_rank_plan(1, accumulation_steps=accumulation_steps, **changes)
    return replace(plan, layout=DeviceLayout(num_devices=len(cut), stage_blocks=cut))


def test_a_job_of_two_stages_leaves_the_files_and_numbers_of_one_device(run_job: RunJob, tmp_path: Path) -> None:
    (one,) = answers_of(run_job(make_rank_plan(1, accumulation_steps=2), job="one", model="untied", workload=TWO_STEPS))
    first, second = answers_of(run_job(make_cut_plan(1, 2), job="two", model="untied", workload=TWO_STEPS))
    for key in ("loss", "validation_loss", "validation_loss_start", "weights_sha256"):
        assert first["result"]["summary"][key] == one["result"]["summary"][key], key
    artifacts = [{artifact["file"]: artifact["sha256"] for artifact in done["result"]["artifacts"]} for done in (first, one)]
    assert artifacts[0] == artifacts[1]
    assert second["messages"] == []
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = [tmp_path / job / "checkpoints" / "step-000002-f1" / name for job in ("one", "two")]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    evaluated = [[m["validation_loss"] for m in done["messages"] if m.get("kind") == "eval"] for done in (one, first)]
    assert evaluated[0] == evaluated[1]


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (make_cut_plan(2, 1), make_rank_plan(1, accumulation_steps=2)),
        (make_rank_plan(1, accumulation_steps=2), make_cut_plan(1, 2)),
        (make_cut_plan(1, 2), make_rank_plan(2, "zero3")),
        (make_rank_plan(2, "zero1"), make_cut_plan(1, 2)),
    ],
    ids=["to-one-device", "from-one-device", "to-zero3", "from-zero1"],
)
def test_a_checkpoint_goes_on_under_another_layout_to_the_same_weights(
    run_job: RunJob, tmp_path: Path, before: Plan, after: Plan
) -> None:
    answers_of(run_job(make_rank_plan(1, accumulation_steps=2), job="whole", model="untied", workload=TWO_STEPS))
    stopped = answers_of(run_job(before, job="job", model="untied", workload=TWO_STEPS, stops_before_step=3))
    assert [done["result"]["outcome"] for done in stopped] == ["drained"] * before.layout.num_devices
    went_on = answers_of(
        run_job(after, job="job", model="untied", workload=TWO_STEPS, resume_from="newest", attempt=2)
    )
    assert went_on[0]["messages"][1]["resumed_from_step"] == 2
    found, expected = weights_of(tmp_path / "job"), weights_of(tmp_path / "whole")
    assert all((found[name] == weight).all() for name, weight in expected.items())


@pytest.mark.parametrize("frozen", ["same", "int4"])
def test_adapters_on_a_base_model_that_is_cut_end_as_on_one_device(run_job: RunJob, frozen: str) -> None:
    answers_of(run_job(make_rank_plan(1, accumulation_steps=4), job="base", model="untied", workload={"num_steps": 1}))
    plans = make_rank_plan(1, accumulation_steps=2), make_cut_plan(1, 2)
    done, held_bytes = [], []
    for job, plan in zip(("one", "two"), plans, strict=True):
        packed = replace(plan, weights=replace(plan.weights, frozen=frozen))
        results = [answer["result"] for answer in answers_of(run_job(packed, job=job, model="untied", **TUNED))]
        done.append(results[0])
        held_bytes.append(sum(result["measured"]["device_bytes_by_category"]["weights"] for result in results))
    # Each weight is on one stage, but for the one number in the place of what is outside of blocks.
    assert 0 <= held_bytes[1] - held_bytes[0] <= 64
    peaks = results[0]["measured"]["rank_peak_bytes"]
    assert f"peak {format_bytes(max(peaks))} of a budget" in results[0]["message"]
    assert done[1]["summary"] == {**done[0]["summary"], **{k: done[1]["summary"][k] for k in ("tokens_per_s", "data_wait_ms")}}
    shas = [{each["file"]: each["sha256"] for each in result["artifacts"]} for result in done]
    assert shas[0] == shas[1]


def test_a_stage_that_dies_ends_the_others_with_a_word_on_whom_they_waited_for(run_job: RunJob) -> None:
    lost = run_job(make_cut_plan(1, 2), job="job", model="untied", dies_before_step=3, ranks_only=[1], workload=TWO_STEPS)
    assert lost[1]["died"] == -9
    assert lost[0]["error"]["code"] == "rank_lost"


def test_a_stage_over_its_budget_says_so(run_job: RunJob) -> None:
    over = run_job(
        make_cut_plan(1, 2), job="job", model="untied", workload=TWO_STEPS, budgets_bytes=[2**40, 400_000]
    )
    assert over[1]["error"]["code"] == "out_of_device_memory"


def test_a_plan_found_for_unequal_devices_keeps_to_each_ones_memory_and_to_the_bits_of_one_device(
    run_job: RunJob,
) -> None:
    workload = make_workload(num_steps=4, sample_tokens=4, eval_batches=2, **WORK)
    spec = read_model_spec(MODELS["untied"])
    shapes = tuple((size, workload.sequence_length) for size in (1, 2, 4))
    profile = trace(spec, extent=Extent(representations=("fp32",), shapes=shapes))
    smallest = make_cut_plan(1, 2, accumulation_steps=4)
    smallest = replace(smallest, activations=ActivationsPlan(per_block=("recompute",) * 3))
    needed = estimate_training(profile, plan=smallest, workload=workload, machine=replace(make_cpu_machine(), num_devices=2))
    machine = play_devices(make_cpu_machine(), [round(1.05 * num_bytes) for num_bytes in needed.rank_peak_bytes])
    goal = Goal(
        device_budget_bytes=UNLIMITED_BYTES,
        num_devices=2,
        forbid=FORBID,
        pins=read_pins(["batch.micro_batch_size=1"]),
    )
    chosen = plan_profiled(profile, machine=machine, workload=workload, goal=goal, with_ways_out=False).result.chosen
    assert sorted(chosen.plan.layout.stage_blocks) == [1, 2]
    assert chosen.verdict == "fits"
    ranks = chosen.prediction.ranks
    assert len({rank.device for rank in ranks}) == 2
    budgets_bytes = [rank.memory_bytes for rank in ranks]
    first, *_ = answers_of(run_job(chosen.plan, job="cut", model="untied", workload=WORK, budgets_bytes=budgets_bytes))
    measured = first["result"]["measured"]["rank_peak_bytes"]
    assert all(abs(peak - rank.peak_bytes) <= 64 for peak, rank in zip(measured, ranks, strict=True)), (measured, ranks)
    alone = replace(chosen.plan, layout=DeviceLayout())
    (one,) = answers_of(run_job(alone, job="one", model="untied", workload=WORK))
    for key in ("loss", "validation_loss", "validation_loss_start", "weights_sha256"):
        assert first["result"]["summary"][key] == one["result"]["summary"][key], key
    swapped = run_job(chosen.plan, job="swapped", model="untied", workload=WORK, budgets_bytes=budgets_bytes[::-1])
    assert {reply["error"]["code"] for reply in swapped if "error" in reply} <= {"out_of_device_memory", "rank_lost"}
    assert any(reply.get("error", {}).get("code") == "out_of_device_memory" for reply in swapped)
