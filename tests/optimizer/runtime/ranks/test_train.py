"""Whole jobs of several ranks: the same results as on one device, checkpoints of any layout, and ranks that are lost."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.serialize import to_json
from optimizer.estimate.job.load import estimate_load
from optimizer.estimate.step.setting import lay_out_ranks
from optimizer.estimate.step.simulate import Resident
from optimizer.estimate.training import simulate_step
from optimizer.models.spec import read_model_spec
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.plan.plan import Plan
from optimizer.workload import Adapter
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.ranks.cases import MODELS
from tests.optimizer.runtime.ranks.conftest import answers_of
from tests.optimizer.runtime.ranks.pool import RankPool
from tests.optimizer.runtime.ranks.rank_process import list_dev_shm
from tests.optimizer.runtime.tiny import (
    CONFIGS,
    artifacts_of,
    make_plan,
    make_workload,
    write_token_file,
    write_tokenizer,
)

ON_HOST = {"gradients": "host", "state_place": "host"}
STREAMED = {**ON_HOST, "weights_place": "host"}
UNEVEN = (RankShare(accumulation_steps=1, per_block=("recompute",) * 3), RankShare(accumulation_steps=3))
"""A small device and one that is three times as fast."""
TUNED: dict[str, Any] = {
    "weights": "base/artifacts/f1/model",
    "workload": {"mode": "finetune", "adapter": {"rank": 4}, "global_batch_size": 2, "export": {"adapter": "both"}},
}
"""Adapters on what the job ``base`` has left."""
TRAINED_TOLERANCE = 1e-5
"""Tolerance of weights after steps that differ in the order of sums (``test_steps.py``)."""


def make_rank_plan(
    num_ranks: int, data: str = "replicated", *, accumulation_steps: int = 1, replicas: int = 1, **changes: Any
) -> Plan:
    plan = make_plan(micro_batch_size=1, accumulation_steps=accumulation_steps, **changes)
    return replace(plan, layout=DeviceLayout(num_devices=num_ranks, data=data, replicas=replicas))


def make_uneven_plan(data: str, *, turned: bool = False) -> Plan:
    """turned: the large one first."""
    ranks = UNEVEN[::-1] if turned else UNEVEN
    return replace(make_rank_plan(2, data), layout=DeviceLayout(num_devices=2, data=data, ranks=ranks))


@pytest.fixture
def run_job(pool: RankPool, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    write_token_file(tmp_path / "tokens")
    write_tokenizer(tmp_path / "tokenizer.json")

    def run(
        plan: Plan,
        *,
        job: str,
        model: str = "decoder",
        resume_from: str | None = None,
        attempt: int = 1,
        timeout_s: float = 60.0,
        workload: dict[str, Any] | None = None,
        weights: str | None = None,
        budgets_bytes: list[int] | None = None,
        **command: Any,
    ) -> list[dict[str, Any]]:
        values = {"global_batch_size": 4, "num_steps": 4, "sample_tokens": 4, "eval_batches": 2, "eval_every_steps": 0}
        document = {
            "config": {**CONFIGS, **MODELS, "gpt2": CONFIGS["gpt2"]}[model],
            "plan": plan.to_json(),
            "workload": to_json(make_workload(**{**values, **(workload or {})})),
            "folder": str(tmp_path),
            "job": job,
            "resume_from": resume_from,
            "attempt": attempt,
            "weights": weights,
            **({"budgets_bytes": budgets_bytes} if budgets_bytes else {}),
        }
        return pool.run({"kind": "train", "run": document, **command}, num_ranks=plan.layout.num_devices, timeout_s=timeout_s)

    return run


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(artifacts_of(folder) / "model" / "model.safetensors")


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=TRAINED_TOLERANCE)


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("dtype", "data", "places"),
    [
        ("fp32", "zero1", {}),
        ("bf16", "zero1", {}),
        ("fp32", "replicated", STREAMED),
        ("fp32", "zero1", STREAMED),
        ("bf16", "zero2", STREAMED),
        ("bf16", "zero3", {}),
        ("fp32", "zero3", ON_HOST),
    ],
    ids=["fp32", "masters", "streamed", "one-home", "one-home-masters", "dealt-out-masters", "dealt-out"],
)
def test_a_job_of_two_ranks_leaves_the_weights_and_numbers_of_one_device(
    run_job: Callable[..., list[dict[str, Any]]], tmp_path: Path, dtype: str, data: str, places: dict[str, str]
) -> None:
    two = {"global_batch_size": 2, "checkpoint_every_steps": 2, "eval_every_steps": 2}
    (one,) = answers_of(run_job(make_rank_plan(1, accumulation_steps=2, dtype=dtype), job="one", workload=two))
    first, second = answers_of(run_job(make_rank_plan(2, data, dtype=dtype, **places), job="two", workload=two))
    for key in ("loss", "validation_loss", "validation_loss_start", "weights_sha256"):
        assert first["result"]["summary"][key] == one["result"]["summary"][key], key
    artifacts = [{artifact["file"]: artifact["sha256"] for artifact in done["result"]["artifacts"]} for done in (first, one)]
    assert artifacts[0] == artifacts[1]
    assert second["messages"] == []
    assert second["result"]["artifacts"] == []
    assert second["result"]["summary"]["validation_loss"] == one["result"]["summary"]["validation_loss"]
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = [tmp_path / job / "checkpoints" / "step-000002-f1" / name for job in ("one", "two")]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    evaluated = [[m["validation_loss"] for m in done["messages"] if m.get("kind") == "eval"] for done in (one, first)]
    assert evaluated[0] == evaluated[1]


def test_rank_0_reports_the_peak_of_each_rank(run_job: Callable[..., list[dict[str, Any]]]) -> None:
    first, second = answers_of(run_job(make_rank_plan(2, "zero1", accumulation_steps=2), job="job"))
    peaks = [done["result"]["measured"]["device_peak_bytes"] for done in (first, second)]
    assert first["result"]["measured"]["rank_peak_bytes"] == peaks
    assert second["result"]["measured"]["rank_peak_bytes"] == peaks
    steps = [message for message in first["messages"] if message.get("kind") == "step"]
    assert [len(step["rank_peak_bytes"]) for step in steps] == [2] * 4
    assert all(step["lane_ms"]["network"] > 0 for step in steps)
    assert all(step["is_counted"] for step in steps)


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("num_ranks", "data", "accumulation_steps"), [(1, "replicated", 4), (4, "zero2", 1), (2, "replicated", 2), (2, "zero3", 2)]
)
def test_a_checkpoint_of_two_ranks_resumes_under_any_layout(
    run_job: Callable[..., list[dict[str, Any]]], tmp_path: Path, num_ranks: int, data: str, accumulation_steps: int
) -> None:
    plan = make_rank_plan(2, "zero1", accumulation_steps=2)
    whole = answers_of(run_job(plan, job="whole"))
    stopped = answers_of(run_job(plan, job="job", stops_before_step=3))
    assert [done["result"]["outcome"] for done in stopped] == ["drained"] * 2
    other = make_rank_plan(num_ranks, data, accumulation_steps=accumulation_steps)
    resumed = answers_of(run_job(other, job="job", resume_from="newest", attempt=2))
    assert {"type": "started", "resumed_from_step": 2} in resumed[0]["messages"]
    assert_close(weights_of(tmp_path / "job"), weights_of(tmp_path / "whole"))
    summaries = [done["result"]["summary"] for done in (resumed[0], whole[0])]
    assert summaries[0]["validation_loss_start"] == summaries[1]["validation_loss_start"]
    assert summaries[0]["validation_loss"] == pytest.approx(summaries[1]["validation_loss"], abs=1e-5)


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "zero2", STREAMED), (1, "replicated", {})),
        ((2, "zero2", STREAMED), (2, "replicated", STREAMED)),
        ((1, "replicated", {}), (2, "zero1", STREAMED)),
        ((2, "zero1", {}), (4, "zero1", STREAMED)),
        ((2, "zero3", {}), (1, "replicated", {})),
        ((4, "zero3", {}), (2, "zero2", STREAMED)),
        ((4, "zero3", {"replicas": 2}), (2, "zero1", STREAMED)),
        ((2, "zero3", {}), (4, "zero2", {**STREAMED, "replicas": 2})),
    ],
    ids=[
        "to-one",
        "to-homes-of-their-own",
        "from-one",
        "from-two-to-four",
        "dealt-out-to-one",
        "dealt-out-to-one-home",
        "from-replicas",
        "to-replicas",
    ],
)
def test_a_checkpoint_goes_on_with_one_home_for_all_ranks_and_without(
    run_job: Callable[..., list[dict[str, Any]]], tmp_path: Path, before: tuple[Any, ...], after: tuple[Any, ...]
) -> None:
    def plan_of(num_ranks: int, data: str, places: dict[str, Any]) -> Plan:
        return make_rank_plan(num_ranks, data, accumulation_steps=4 // num_ranks, **places)

    whole = answers_of(run_job(plan_of(1, "replicated", {}), job="whole"))
    answers_of(run_job(plan_of(*before), job="job", stops_before_step=3))
    resumed = answers_of(run_job(plan_of(*after), job="job", resume_from="newest", attempt=2))
    assert {"type": "started", "resumed_from_step": 2} in resumed[0]["messages"]
    assert_close(weights_of(tmp_path / "job"), weights_of(tmp_path / "whole"))
    summaries = [done["result"]["summary"] for done in (resumed[0], whole[0])]
    assert summaries[0]["validation_loss"] == pytest.approx(summaries[1]["validation_loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (make_uneven_plan("zero1"), make_rank_plan(1, accumulation_steps=4)),
        (make_rank_plan(2, "zero2", accumulation_steps=2), make_uneven_plan("replicated")),
        (make_uneven_plan("replicated"), make_uneven_plan("zero1", turned=True)),
    ],
    ids=["to-one-device", "from-equal-ranks", "other-shares"],
)
def test_a_checkpoint_goes_on_with_unequal_ranks_and_from_them(
    run_job: Callable[..., list[dict[str, Any]]], tmp_path: Path, before: Plan, after: Plan
) -> None:
    whole = answers_of(run_job(make_rank_plan(1, accumulation_steps=4), job="whole"))
    answers_of(run_job(before, job="job", stops_before_step=3))
    resumed = answers_of(run_job(after, job="job", resume_from="newest", attempt=2))
    assert {"type": "started", "resumed_from_step": 2} in resumed[0]["messages"]
    assert_close(weights_of(tmp_path / "job"), weights_of(tmp_path / "whole"))
    summaries = [done["result"]["summary"] for done in (resumed[0], whole[0])]
    assert summaries[0]["validation_loss"] == pytest.approx(summaries[1]["validation_loss"], abs=1e-5)


def test_unequal_ranks_stopped_and_resumed_end_with_the_same_bits(run_job: Callable[..., list[dict[str, Any]]]) -> None:
    plan = make_uneven_plan("zero1")
    whole = answers_of(run_job(plan, job="whole", model="gpt2"))
    answers_of(run_job(plan, job="job", model="gpt2", stops_before_step=3))
    resumed = answers_of(run_job(plan, job="job", model="gpt2", resume_from="newest", attempt=2))
    for key in ("weights_sha256", "validation_loss", "loss"):
        assert resumed[0]["result"]["summary"][key] == whole[0]["result"]["summary"][key], key


def test_unequal_ranks_keep_budgets_of_their_own(run_job: Callable[..., list[dict[str, Any]]]) -> None:
    """Expect the small device to run out of memory if its budget is a little less than its peak, whatever the other may have."""
    plan = make_uneven_plan("replicated")
    first, _ = answers_of(run_job(plan, job="measured"))
    small, large = first["result"]["measured"]["rank_peak_bytes"]
    assert small < large
    budgets = [small + 2**16, large + 2**16]
    assert budgets[0] < large
    answers_of(run_job(plan, job="fits", budgets_bytes=budgets))
    fails, _ = run_job(plan, job="fails", budgets_bytes=[small - 2**10, large + 2**16])
    assert fails["error"]["code"] == "out_of_device_memory"


def tune_alone_and_together(run_job: Callable[..., list[dict[str, Any]]], data: str, **weights: Any) -> list[dict[str, Any]]:
    """Train adapters on one device, then on two ranks; what each of the three processes has done, the first two with the same
    numbers.
    """
    answers_of(run_job(make_rank_plan(1, accumulation_steps=4), job="base"))
    one, two = (
        replace(plan, weights=replace(plan.weights, frozen="int4", **weights))
        for plan in (make_rank_plan(1, accumulation_steps=2), make_rank_plan(2, data))
    )
    (alone,) = answers_of(run_job(one, job="one", **TUNED))
    first, second = answers_of(run_job(two, job="two", **TUNED))
    for key in ("loss", "validation_loss", "weights_sha256"):
        assert first["result"]["summary"][key] == alone["result"]["summary"][key], key
    return [alone, first, second]


def test_rank_0_alone_reads_and_packs_the_frozen_weights_that_stream_to_all(run_job: Callable[..., list[dict[str, Any]]]) -> None:
    done = [each["result"]["measured"] for each in tune_alone_and_together(run_job, "zero1", place="host")]
    loads = [measured["stages"]["load"]["host_peak_bytes"] for measured in done]
    home_bytes = done[0]["host_peak_bytes"]
    # The other rank reads nothing, and has no more of the home than its part.
    assert loads[2] == home_bytes // 2
    assert loads[1] > loads[2]
    assert done[1]["host_peak_bytes"] + done[2]["host_peak_bytes"] == home_bytes


def test_each_rank_reads_and_packs_the_part_of_the_frozen_weights_that_it_keeps(
    run_job: Callable[..., list[dict[str, Any]]]
) -> None:
    alone, first, second = (done["result"] for done in tune_alone_and_together(run_job, "zero3"))
    artifacts = [{artifact["file"]: artifact["sha256"] for artifact in result["artifacts"]} for result in (first, alone)]
    assert artifacts[0] == artifacts[1]
    loads = [result["measured"]["stages"]["load"]["device_peak_bytes"] for result in (alone, first, second)]
    # What belongs to no block is read by both.
    assert max(loads[1:]) < 0.9 * loads[0]
    assert loads[1] + loads[2] < 1.7 * loads[0]


def test_the_stages_of_each_rank_take_the_bytes_predicted_where_weights_are_dealt_out(
    run_job: Callable[..., list[dict[str, Any]]]
) -> None:
    answers_of(run_job(make_rank_plan(1, accumulation_steps=4), job="base"))
    plan = make_rank_plan(2, "zero3")
    plan = replace(plan, weights=replace(plan.weights, frozen="int4", prefetch=2))
    changes: dict[str, Any] = {"mode": "finetune", "adapter": {"rank": 4}, "global_batch_size": 2}
    done = answers_of(run_job(plan, job="job", weights="base/artifacts/f1/model", workload=changes))
    workload = make_workload(**{**changes, "adapter": Adapter(rank=4), "num_steps": 4, "eval_batches": 2})
    profile = trace(
        read_model_spec(MODELS["decoder"]), extent=extent_of([(plan, workload)]), adapter=workload.adapter
    )
    machine = replace(make_cpu_machine(), num_threads=2)
    laid = lay_out_ranks(profile, plan=plan, workload=workload, machine=machine)
    for each in laid:
        stages = done[each.rank]["result"]["measured"]["stages"]
        measured = {name: stages[name]["device_peak_bytes"] for name in ("first_step", "steady_step", "evaluation", "load")}
        peaks = each.setting.stages.estimate(
            each.schedule, each.resident, simulate_step(each), choices=plan.activations.per_block
        )
        predicted = {peak.stage: peak.device_peak_bytes for peak in peaks.list()}
        loaded = Resident(device=each.setting.stages.loaded(each.resident))
        load = estimate_load(profile, plan=plan, workload=workload, machine=machine, loaded=loaded, rank=each.rank)
        assert load is not None
        assert {**predicted, "load": load.device_bytes} == measured, each.rank


def test_ranks_stopped_and_resumed_end_with_the_same_bits_dropout_included(
    run_job: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    plan = make_rank_plan(2, "zero2", accumulation_steps=2, dtype="bf16")
    whole = answers_of(run_job(plan, job="whole", model="gpt2"))
    answers_of(run_job(plan, job="job", model="gpt2", stops_before_step=3))
    random = load_file(tmp_path / "job" / "checkpoints" / "step-000002-f1" / "random.safetensors")
    assert random.keys() == {"cpu", "cpu.1"}
    assert not torch.equal(random["cpu"], random["cpu.1"])
    resumed = answers_of(run_job(plan, job="job", model="gpt2", resume_from="newest", attempt=2))
    for key in ("weights_sha256", "validation_loss", "loss"):
        assert resumed[0]["result"]["summary"][key] == whole[0]["result"]["summary"][key], key


def test_the_probe_of_rank_0_ends_all_ranks_with_a_checkpoint(run_job: Callable[..., list[dict[str, Any]]]) -> None:
    plan = make_rank_plan(2, "zero1", accumulation_steps=2, gradients="host", state_place="disk")
    done = answers_of(run_job(plan, job="job", workload={"num_steps": 24}, probes="too slow"))
    assert [(rank["result"]["outcome"], rank["result"]["step"]) for rank in done] == [("drained", 20)] * 2
    assert [rank["result"]["message"] for rank in done] == ["too slow"] * 2
    assert [message["type"] for message in done[0]["messages"]][-1] == "checkpoint"


@pytest.mark.parametrize(
    ("data", "places"), [("zero1", {}), ("zero1", STREAMED), ("zero3", {})], ids=["on-the-devices", "one-home", "dealt-out"]
)
def test_a_killed_rank_ends_the_others_with_an_error_that_says_so(
    run_job: Callable[..., list[dict[str, Any]]], tmp_path: Path, data: str, places: dict[str, str]
) -> None:
    plan = make_rank_plan(2, data, accumulation_steps=2, **places)
    in_memory = list_dev_shm()
    start_s = time.monotonic()
    survivor, killed = run_job(
        plan, job="job", workload={"checkpoint_every_steps": 1}, ranks_only=[1], dies_before_step=3
    )
    assert killed == {"died": -9}
    assert survivor["error"]["code"] == "rank_lost"
    assert "another rank was lost: rank 0 of 2" in survivor["error"]["message"]
    assert survivor["took_s"] < 60.0
    assert time.monotonic() - start_s < 120
    kept = sorted(folder.name for folder in (tmp_path / "job" / "checkpoints").iterdir())
    assert kept == ["step-000001-f1", "step-000002-f1"]
    json.dumps(survivor)
    assert list_dev_shm() == in_memory
    # With a process in place of the one that was killed, and new memory.
    resumed = answers_of(run_job(plan, job="job", resume_from="newest", attempt=2))
    assert {"type": "started", "resumed_from_step": 2} in resumed[0]["messages"]
    whole = answers_of(run_job(plan, job="whole"))
    assert resumed[0]["result"]["summary"]["weights_sha256"] == whole[0]["result"]["summary"]["weights_sha256"]


def test_a_rank_that_hangs_is_given_up_at_the_deadline(run_job: Callable[..., list[dict[str, Any]]]) -> None:
    plan = make_rank_plan(2, accumulation_steps=2)
    waiting, _ = run_job(plan, job="job", ranks_only=[1], hangs_before_step=2, hangs_s=3.0, timeout_s=1.0)
    assert waiting["error"]["code"] == "rank_lost"
    assert waiting["error"]["fields"]["waited_s"] == pytest.approx(1.0, abs=0.9)


def test_a_plan_for_more_devices_than_ranks_is_refused(run_job: Callable[..., list[dict[str, Any]]]) -> None:
    plan = replace(make_rank_plan(1, accumulation_steps=2), layout=DeviceLayout(num_devices=2))
    (reply,) = run_job(replace(plan, layout=DeviceLayout()), job="job", as_plan=plan.to_json())
    assert reply["error"]["code"] == "invalid_plan"
    assert "plan.layout.num_devices is 2; this process trains with 1" in reply["error"]["message"]


def test_a_batch_that_ranks_cannot_share_is_refused_in_words(run_job: Callable[..., list[dict[str, Any]]]) -> None:
    plan = replace(make_rank_plan(2), batch=BatchPlan(micro_batch_size=3, accumulation_steps=1))
    replies = run_job(plan, job="job")
    for reply in replies:
        assert reply["error"]["message"] == (
            "plan.batch makes 6 sequences per step on 2 devices; workload.global_batch_size is 4"
        )
