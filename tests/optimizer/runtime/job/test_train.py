import dataclasses
import errno
import json
import multiprocessing
import os
import signal
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_hook

from optimizer.base.errors import DiskFull, LossNotFinite, OutOfDeviceMemory
from optimizer.goal import Goal
from optimizer.plan.plan import Plan
from optimizer.runtime.job.checkpoint import find_resumable
from optimizer.runtime.job.train import train
from optimizer.runtime.job.training_run import Measured, TrainingRun
from tests.optimizer.runtime.counted_card import counted_card
from tests.optimizer.runtime.tiny import (
    artifacts_of,
    make_plan,
    make_spec,
    make_workload,
    write_token_file,
    write_tokenizer,
)


def never() -> bool:
    return False


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., TrainingRun]:
    tokens = write_token_file(tmp_path / "tokens")
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")

    def make(
        name: str = "llama", *, folder: str = "job", plan: Plan | None = None, budget_bytes: int = 2**40, **changes: Any
    ) -> TrainingRun:
        return TrainingRun(
            spec=make_spec(name),
            plan=plan or make_plan(),
            workload=make_workload(**{"sample_tokens": 8, "eval_batches": 2, "eval_every_steps": 3, **changes}),
            goal=Goal(device_budget_bytes=budget_bytes),
            device="cpu",
            attempt=1,
            fence=7,
            job_folder=tmp_path / folder,
            weights_folder=None,
            token_file=tokens,
            tokenizer_file=tokenizer,
            timeline_every_s=0.0,
        )

    return make


def stop_after(messages: list[Any], step: int) -> Callable[..., Any]:
    """True once the record of this step was reported."""
    return lambda: any(m.get("kind") == "step" and m["step"] >= step for m in messages)


def weights_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    return load_file(artifacts_of(run.job_folder) / "model" / "model.safetensors")


def test_a_job_trains_and_leaves_weights_a_sample_and_its_measurements(make_run: Callable[..., TrainingRun]) -> None:
    messages: list[Any] = []
    run = make_run(checkpoint_every_steps=3)
    result = train(run, report=messages.append, should_stop=never)
    assert result.outcome == "succeeded"
    assert result.step == 6
    assert result.summary["validation_loss"] < result.summary["validation_loss_start"]
    assert sum(result.measured.device_bytes_by_category.values()) == result.measured.device_peak_bytes
    assert {artifact.name for artifact in result.artifacts} >= {"model.safetensors", "config.json", "sample.txt"}
    assert result.summary["weights_sha256"] == next(a.sha256 for a in result.artifacts if a.name == "model.safetensors")
    for artifact in result.artifacts:
        assert (run.job_folder / artifact.file).stat().st_size == artifact.num_bytes
    json.dumps(result.to_json(), allow_nan=False)


def test_what_is_reported_follows_the_contract(make_run: Callable[..., TrainingRun]) -> None:
    messages: list[Any] = []
    train(make_run(checkpoint_every_steps=3), report=messages.append, should_stop=never)
    steps = [m for m in messages if m.get("kind") == "step"]
    assert [m["step"] for m in steps] == [1, 2, 3, 4, 5, 6]
    assert set(steps[0]) == {
        *("type", "kind", "attempt", "step", "time_s", "loss", "learning_rate", "grad_norm", "step_ms"),
        *("tokens_per_s", "device_peak_bytes", "device_bytes", "host_bytes", "is_counted"),
        *("data_wait_ms", "copied_bytes", "lane_ms", "stall_ms"),
    }
    assert all(m["is_counted"] for m in steps)
    assert [m["step"] for m in messages if m.get("kind") == "eval"] == [0, 3, 6]
    checkpoints = [m for m in messages if m["type"] == "checkpoint"]
    assert [m["folder"] for m in checkpoints] == ["checkpoints/step-000003-f7", "checkpoints/step-000006-f7"]
    timelines = [m for m in messages if m.get("kind") == "timeline"]
    peaks = {m["step"]: m["device_peak_bytes"] for m in steps}
    for timeline in timelines:
        assert len(timeline["points"]) <= 200
        assert max(sum(sizes.values()) for _, sizes in timeline["points"]) == peaks[timeline["step"]]
    assert timelines
    assert all(len(json.dumps(m, allow_nan=False)) < 64 * 1024 for m in messages)
    phases = [m["phase"] for m in messages if m["type"] == "phase"]
    assert phases[0] == "loading"
    assert phases[-3:] == ["saving", "verifying", "sampling"]


def test_a_run_reports_the_time_and_bytes_of_its_lanes(make_run: Callable[..., TrainingRun]) -> None:
    messages: list[Any] = []
    train(make_run(plan=make_plan("offload", **ON_DISK)), report=messages.append, should_stop=never)
    steps = [m for m in messages if m.get("kind") == "step"]
    for step in steps:
        assert set(step["stall_ms"]) >= {"copy_in", "copy_out", "host"}
        assert step["lane_ms"]["disk"] > 0
        told_ms = step["lane_ms"]["compute"] + sum(step["stall_ms"].values())
        assert told_ms == pytest.approx(step["step_ms"], abs=0.1)
        assert set(step["copied_bytes"]) == {"device_to_host", "host_to_device", "disk_to_host", "host_to_disk"}
    timeline = [m for m in messages if m.get("kind") == "timeline"][-1]
    assert {span[0] for span in timeline["spans"]} >= {"copy_in", "copy_out", "host", "disk"}
    assert all(0 <= begin <= end for _, begin, end, _ in timeline["spans"])


def test_between_timelines_only_the_first_steps_are_counted_and_the_bytes_stay_those_of_the_last(
    make_run: Callable[..., TrainingRun]
) -> None:
    messages: list[Any] = []
    run = dataclasses.replace(make_run(), timeline_every_s=1e6)
    result = train(run, report=messages.append, should_stop=never)
    steps = [m for m in messages if m.get("kind") == "step"]
    assert [m["is_counted"] for m in steps] == [True, True, True, False, False, False]
    assert {m["device_peak_bytes"] for m in steps[2:]} == {result.measured.device_peak_bytes}
    uncounted_ms = statistics.median(m["step_ms"] for m in steps[3:])
    assert result.measured.step_ms == uncounted_ms


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("dtype", "bits"), [("fp32", 32), ("fp32", 8), ("bf16", 32), ("bf16", 8)])
def test_a_job_stopped_and_resumed_ends_with_the_same_bits(
    make_run: Callable[..., TrainingRun], name: str, dtype: str, bits: int
) -> None:
    plan = make_plan("keep", "recompute", "offload", dtype=dtype, bits=bits)
    whole = make_run(name, folder="whole", plan=plan)
    expected = train(whole, report=lambda message: None, should_stop=never)
    halves = make_run(name, folder="halves", plan=plan)
    messages: list[Any] = []
    drained = train(halves, report=messages.append, should_stop=stop_after(messages, 4))
    assert (drained.outcome, drained.step) == ("drained", 4)
    torch.manual_seed(999)
    second = dataclasses.replace(halves, resume_from="newest", attempt=2, fence=8)
    messages = []
    result = train(second, report=messages.append, should_stop=never)
    assert {"type": "started", "resumed_from_step": 4} in messages
    assert result.summary["weights_sha256"] == expected.summary["weights_sha256"]
    assert result.summary["validation_loss"] == expected.summary["validation_loss"]
    assert result.summary["validation_loss_start"] == expected.summary["validation_loss_start"]
    expected_weights = weights_of(whole)
    for key, tensor in weights_of(second).items():
        assert torch.equal(tensor, expected_weights[key]), key


ON_HOST = {"gradients": "host", "state_place": "host", "weights_place": "host"}
ON_DISK = {"gradients": "host", "state_place": "disk", "weights_place": "disk"}


@pytest.mark.breadth
@pytest.mark.parametrize("places", [ON_HOST, ON_DISK], ids=["host", "disk"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_job_whose_states_are_elsewhere_ends_with_the_weights_of_plain_training(
    make_run: Callable[..., TrainingRun], places: dict[str, str], dtype: str
) -> None:
    """Weights, validation, checkpoints, export and the sample."""
    plain = train(make_run(folder="plain", plan=make_plan(dtype=dtype)), report=lambda message: None, should_stop=never)
    run = make_run(folder="placed", plan=make_plan("recompute", dtype=dtype, **places), checkpoint_every_steps=3)
    placed = train(run, report=lambda message: None, should_stop=never)
    for key in ("weights_sha256", "validation_loss", "validation_loss_start", "loss"):
        assert placed.summary[key] == plain.summary[key]
    hashes = [{a.name: a.sha256 for a in result.artifacts} for result in (placed, plain)]
    assert hashes[0]["sample.txt"] == hashes[1]["sample.txt"]
    assert placed.measured.device_peak_bytes < plain.measured.device_peak_bytes
    assert (placed.measured.disk_peak_bytes > 0) == (places is ON_DISK)
    assert sorted(path.name for path in run.job_folder.iterdir()) == ["artifacts", "checkpoints"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_is_the_same_whatever_the_places(make_run: Callable[..., TrainingRun], dtype: str) -> None:
    folders = []
    for index, places in enumerate(({}, ON_HOST, ON_DISK)):
        run = make_run(folder=str(index), plan=make_plan(dtype=dtype, **places), checkpoint_every_steps=2, num_steps=2)
        train(run, report=lambda message: None, should_stop=never)
        folders.append(run.job_folder / "checkpoints" / "step-000002-f7")
    for name in ("model.safetensors", "optimizer.safetensors", "random.safetensors"):
        assert len({(folder / name).read_bytes() for folder in folders}) == 1, name


@pytest.mark.parametrize(("before", "after"), [({}, ON_DISK), (ON_HOST, {}), (ON_DISK, ON_HOST)])
def test_a_job_may_go_on_with_its_states_in_other_places(
    make_run: Callable[..., TrainingRun], before: dict[str, str], after: dict[str, str]
) -> None:
    whole = train(make_run(folder="whole"), report=lambda message: None, should_stop=never)
    stopped = make_run(folder="job", plan=make_plan(**before))
    messages: list[Any] = []
    train(stopped, report=messages.append, should_stop=stop_after(messages, 3))
    second = make_run(folder="job", plan=make_plan("recompute", **after))
    result = train(
        dataclasses.replace(second, resume_from="newest", attempt=2, fence=8),
        report=lambda message: None,
        should_stop=never,
    )
    assert result.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_stopped_and_resumed_with_its_state_on_the_disk_ends_with_the_same_bits(
    make_run: Callable[..., TrainingRun], momentum: float
) -> None:
    sgd = {"optimizer": "sgd", "momentum": momentum}
    whole = train(make_run(folder="whole", **sgd), report=lambda message: None, should_stop=never)
    run = make_run(folder="halves", plan=make_plan("recompute", **ON_DISK), **sgd)
    messages: list[Any] = []
    train(run, report=messages.append, should_stop=stop_after(messages, 4))
    second = dataclasses.replace(run, resume_from="newest", attempt=2, fence=8)
    result = train(second, report=lambda message: None, should_stop=never)
    assert result.summary["weights_sha256"] == whole.summary["weights_sha256"]


def train_until_killed(run: TrainingRun, step: int) -> None:
    """Train in a process of its own, which is killed once the record of this step was reported."""

    def report(message: dict[str, Any]) -> None:
        if message.get("kind") == "step" and message["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(run, report=report, should_stop=never)


def test_a_killed_job_goes_on_from_its_checkpoint_to_the_same_bits(make_run: Callable[..., TrainingRun]) -> None:
    plan = make_plan("offload", **ON_DISK)
    whole = train(make_run(folder="whole", plan=plan), report=lambda message: None, should_stop=never)
    run = make_run(folder="killed", plan=plan, checkpoint_every_steps=2)
    process = multiprocessing.get_context("spawn").Process(target=train_until_killed, args=(run, 5))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    # Nothing of the scratch file is left, though nobody could remove it.
    assert [path.name for path in run.job_folder.iterdir()] == ["checkpoints"]
    messages: list[Any] = []
    result = train(
        dataclasses.replace(run, resume_from="newest", attempt=2, fence=8), report=messages.append, should_stop=never
    )
    assert {"type": "started", "resumed_from_step": 4} in messages
    assert result.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_a_disk_too_small_for_the_states_is_refused_before_the_first_step(
    make_run: Callable[..., TrainingRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> Never:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", refuse)
    messages: list[Any] = []
    with pytest.raises(DiskFull, match="the disk of the scratch folder .* is full"):
        train(make_run(plan=make_plan(**ON_DISK)), report=messages.append, should_stop=never)
    assert not any(message.get("kind") == "step" for message in messages)


def test_a_consumed_gradient_that_is_not_finite_leaves_the_last_checkpoint_as_it_was(
    make_run: Callable[..., TrainingRun]
) -> None:
    plan = make_plan(gradients="consume")
    # No clipping and a huge rate: each weight moves by about 1 a step.
    wild = {"learning_rate": 1.0, "max_grad_norm": None, "num_steps": 40, "epsilon": 1e-30, "beta2": 0.0}
    run = make_run(plan=plan, checkpoint_every_steps=1, **wild)
    messages: list[Any] = []
    with pytest.raises(LossNotFinite):
        train(run, report=messages.append, should_stop=never)
    checkpoint = find_resumable(run.job_folder)
    assert checkpoint.manifest.step == max(m["step"] for m in messages if m.get("kind") == "step")
    assert all(bool(tensor.isfinite().all()) for tensor in checkpoint.load("model").values())


def test_two_runs_of_one_job_end_with_the_same_bits(make_run: Callable[..., TrainingRun]) -> None:
    results = [
        train(make_run("gpt2", folder=folder), report=lambda message: None, should_stop=never)
        for folder in ("first", "second")
    ]
    assert results[0].summary["weights_sha256"] == results[1].summary["weights_sha256"]


def test_a_lossless_plan_ends_with_the_weights_of_plain_training(make_run: Callable[..., TrainingRun]) -> None:
    plain = train(make_run("gpt2", folder="plain"), report=lambda message: None, should_stop=never)
    plan = make_plan("recompute", "offload", "recompute")
    planned = train(make_run("gpt2", folder="planned", plan=plan), report=lambda message: None, should_stop=never)
    assert planned.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert planned.measured.device_peak_bytes < plain.measured.device_peak_bytes
    assert planned.measured.host_peak_bytes > 0


def test_a_retried_job_goes_on_from_the_checkpoint_of_the_one_it_retries(make_run: Callable[..., TrainingRun]) -> None:
    whole = train(make_run(folder="whole"), report=lambda message: None, should_stop=never)
    stopped = make_run(folder="stopped")
    messages: list[Any] = []
    train(stopped, report=messages.append, should_stop=stop_after(messages, 2))
    retried = dataclasses.replace(
        make_run(folder="retried"), resume_from="newest", earlier_job_folders=(stopped.job_folder,), fence=8
    )
    told: list[Any] = []
    result = train(retried, report=told.append, should_stop=never)
    assert next(m["resumed_from_step"] for m in told if m["type"] == "started") == 2
    assert result.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_resuming_a_job_that_never_saved_starts_afresh(make_run: Callable[..., TrainingRun]) -> None:
    run = dataclasses.replace(make_run(), resume_from="newest")
    messages: list[Any] = []
    assert train(run, report=messages.append, should_stop=never).outcome == "succeeded"
    assert {"type": "started", "resumed_from_step": 0} in messages


def test_over_the_budget_the_job_stops_with_the_sizes_by_category(make_run: Callable[..., TrainingRun]) -> None:
    plain = train(make_run(folder="plain"), report=lambda message: None, should_stop=never)
    budget_bytes = plain.measured.device_peak_bytes - 1
    with pytest.raises(OutOfDeviceMemory, match=r"device memory ran out in .*: .* more were needed") as caught:
        train(make_run(folder="capped", budget_bytes=budget_bytes), report=lambda message: None, should_stop=never)
    assert caught.value.fields["budget_bytes"] == budget_bytes
    assert caught.value.fields["bytes_by_category"]["weights"] > 0


@pytest.mark.parametrize("eval_step", [0, 3])
def test_an_evaluation_that_only_a_cards_counters_saw_go_over_the_budget_ends_the_job(
    make_run: Callable[..., TrainingRun], eval_step: int
) -> None:
    messages: list[Any] = []
    with counted_card() as memory:

        def spike(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not module.training and messages[-1].get("message") == f"validation loss at step {eval_step}":
                memory.spike(2**40 + 512)

        hook = register_module_forward_hook(spike)
        try:
            with pytest.raises(OutOfDeviceMemory, match="inside an op in .*: 512 B more were needed") as caught:
                train(make_run(), report=messages.append, should_stop=never)
        finally:
            hook.remove()
    assert caught.value.fields["stage"] == "evaluation"
    assert max((m["step"] for m in messages if m.get("kind") == "step"), default=0) == eval_step


def test_exactly_the_measured_peak_is_budget_enough(make_run: Callable[..., TrainingRun]) -> None:
    plain = train(make_run(folder="plain"), report=lambda message: None, should_stop=never)
    budget_bytes = plain.measured.device_peak_bytes
    capped = make_run(folder="capped", budget_bytes=budget_bytes)
    result = train(capped, report=lambda message: None, should_stop=never)
    assert result.measured.device_peak_bytes == budget_bytes


def test_a_loss_that_is_not_finite_ends_the_job(make_run: Callable[..., TrainingRun]) -> None:
    # No clipping and a huge rate: each weight moves by about 1 a step.
    run = make_run(learning_rate=1.0, max_grad_norm=None, num_steps=40, epsilon=1e-30, beta2=0.0)
    with pytest.raises(LossNotFinite, match=r"the (loss|gradient norm) became (nan|inf)"):
        train(run, report=lambda message: None, should_stop=never)


def test_a_run_that_its_probe_ends_goes_on_to_the_same_weights(make_run: Callable[..., TrainingRun]) -> None:
    whole = train(make_run(folder="whole", num_steps=30), report=lambda message: None, should_stop=never)
    asked: list[Any] = []

    def probe(measured: Measured, num_steps_left: int) -> str:
        asked.append((measured.device_peak_bytes, num_steps_left))
        return "too slow"

    run = make_run(folder="probed", num_steps=30)
    first = train(run, report=lambda message: None, should_stop=never, probe=probe)
    assert (first.outcome, first.reason, first.message) == ("drained", "probed", "too slow")
    assert asked == [(whole.measured.device_peak_bytes, 30 - first.step)]
    again = dataclasses.replace(run, resume_from="newest", plan=make_plan("recompute"))
    second = train(again, report=lambda message: None, should_stop=never)
    assert second.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_a_run_whose_probe_finds_nothing_is_asked_once_and_not_disturbed(make_run: Callable[..., TrainingRun]) -> None:
    asked: list[Any] = []

    def probe(measured: Measured, num_steps_left: int) -> str:
        asked.append(num_steps_left)
        return ""

    result = train(make_run(num_steps=30), report=lambda message: None, should_stop=never, probe=probe)
    assert (result.outcome, len(asked)) == ("succeeded", 1)
