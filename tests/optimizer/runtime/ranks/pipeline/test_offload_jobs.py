"""Whole jobs of a model that is cut and keeps a part of itself on the host: the files of one device, checkpoints and samples."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import NoFeasiblePlan
from optimizer.goal import Goal
from optimizer.models.spec import read_model_spec
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.pins.training import read_pins
from optimizer.profile.extent import Extent
from optimizer.search.cut_model import search_cut
from optimizer.search.problem import PricedPlan
from optimizer.search.training import training_problem
from tests.optimizer.profiles import trace
from tests.optimizer.runtime.ranks.cases import MODELS
from tests.optimizer.runtime.ranks.conftest import answers_of
from tests.optimizer.runtime.ranks.pipeline.test_jobs import TWO_STEPS, make_cut_plan
from tests.optimizer.runtime.ranks.test_train import STREAMED, TUNED, make_rank_plan, run_job, weights_of
from tests.optimizer.runtime.tiny import make_workload

__all__ = ["run_job"]
RunJob = Callable[..., list[dict[str, Any]]]
PINS = ("batch.micro_batch_size=1", "logits_and_loss.num_chunks=1")


def test_a_job_whose_stages_stream_their_weights_leaves_the_files_of_one_device_and_goes_on_as_it(
    run_job: RunJob, tmp_path: Path
) -> None:
    (one,) = answers_of(run_job(make_rank_plan(1, accumulation_steps=2), job="one", model="untied", workload=TWO_STEPS))
    plan = make_cut_plan(1, 2, **STREAMED)
    plan = replace(plan, activations=replace(plan.activations, per_block=("offload", "keep", "offload")))
    first, _ = answers_of(run_job(plan, job="two", model="untied", workload=TWO_STEPS))
    for key in ("loss", "validation_loss", "validation_loss_start", "weights_sha256"):
        assert first["result"]["summary"][key] == one["result"]["summary"][key], key
    artifacts = [{artifact["file"]: artifact["sha256"] for artifact in done["result"]["artifacts"]} for done in (first, one)]
    assert artifacts[0] == artifacts[1]
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = [tmp_path / job / "checkpoints" / "step-000002-f1" / name for job in ("one", "two")]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    stopped = answers_of(run_job(make_cut_plan(2, 1), job="job", model="untied", workload=TWO_STEPS, stops_before_step=3))
    assert [done["result"]["outcome"] for done in stopped] == ["drained"] * 2
    answers_of(run_job(plan, job="job", model="untied", workload=TWO_STEPS, resume_from="newest", attempt=2))
    found, expected = weights_of(tmp_path / "job"), weights_of(tmp_path / "one")
    assert all((found[name] == weight).all() for name, weight in expected.items())


def test_adapters_on_a_packed_base_that_each_stage_streams_end_as_on_one_device(run_job: RunJob) -> None:
    answers_of(run_job(make_rank_plan(1, accumulation_steps=4), job="base", model="untied", workload={"num_steps": 1}))
    done = []
    for job, plan in (("one", make_rank_plan(1, accumulation_steps=2)), ("two", make_cut_plan(1, 2))):
        streamed = replace(plan, weights=replace(plan.weights, frozen="int4", place="host"))
        done.append([answer["result"] for answer in answers_of(run_job(streamed, job=job, model="untied", **TUNED))])
    (alone,), stages = done
    for key in ("loss", "validation_loss", "weights_sha256"):
        assert stages[0]["summary"][key] == alone["summary"][key], key
    shas = [{each["file"]: each["sha256"] for each in result["artifacts"]} for result in (alone, stages[0])]
    assert shas[0] == shas[1]
    # Each stage's blocks have homes on its own host, and nothing else is there.
    homes = [sum(result["measured"]["host_peak_bytes"] for result in results) for results in done]
    assert homes[0] == homes[1]


def test_a_plan_that_is_found_for_too_small_devices_runs_within_their_budgets_to_the_bits_of_one_device(run_job: RunJob) -> None:
    work: dict[str, Any] = {"global_batch_size": 4, "eval_every_steps": 2}
    workload = make_workload(num_steps=4, sample_tokens=4, eval_batches=2, **work)
    shapes = tuple((size, workload.sequence_length) for size in (1, 2, 4))
    profile = trace(read_model_spec(MODELS["untied"]), extent=Extent(representations=("fp32",), shapes=shapes))
    machine = replace(make_cpu_machine(), num_threads=2, num_devices=2)

    def search(budget_bytes: int, *forbid: Any) -> PricedPlan:
        goal = Goal(device_budget_bytes=budget_bytes, num_devices=2, forbid=("disk", *forbid), pins=read_pins(PINS))
        layout = DeviceLayout(num_devices=2, stage_blocks=(1, 2))
        return search_cut(training_problem(profile, workload=workload, goal=goal, machine=machine, layout=layout)).chosen

    with pytest.raises(NoFeasiblePlan) as raised:
        search(1, "offload", "offload_gradients")
    budget_bytes = int(raised.value.fields["smallest_feasible_bytes"]) * 2 // 3
    chosen = search(budget_bytes)
    assert chosen.plan.optimizer_state.place == "host"
    first, second = answers_of(run_job(chosen.plan, job="cut", model="untied", workload=work, budgets_bytes=[budget_bytes] * 2))
    measured = first["result"]["measured"]["rank_peak_bytes"]
    predicted = chosen.prediction.rank_peak_bytes
    assert all(abs(ours - theirs) <= 64 for ours, theirs in zip(predicted, measured, strict=True)), (predicted, measured)
    on_host = [answer["result"]["measured"]["host_peak_bytes"] for answer in (first, second)]
    assert max(on_host) == chosen.prediction.host_peak_bytes
    alone = replace(chosen.plan, layout=DeviceLayout())
    (one,) = answers_of(run_job(alone, job="one", model="untied", workload=work))
    for key in ("loss", "validation_loss", "validation_loss_start", "weights_sha256"):
        assert first["result"]["summary"][key] == one["result"]["summary"][key], key
