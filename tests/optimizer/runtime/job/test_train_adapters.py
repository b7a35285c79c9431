"""A job that trains adapters: what its checkpoints hold, that it resumes to the same bits, what it leaves."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optimizer.base.errors import CheckpointInvalid
from optimizer.goal import Goal
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.checkpoint import read_checkpoint
from optimizer.runtime.job.train import train
from optimizer.runtime.job.training_run import TrainingResult, TrainingRun
from optimizer.workload import Adapter
from tests.optimizer.runtime.tiny import (
    artifacts_of,
    make_plan,
    make_spec,
    make_workload,
    write_token_file,
    write_tokenizer,
)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., TrainingRun]:
    tokens = write_token_file(tmp_path / "tokens")
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")

    def make(
        *,
        folder: str = "job",
        form: str = "nf4",
        place: str = "device",
        plan_changes: dict[str, Any] | None = None,
        resume_from: Any = None,
        **changes: Any,
    ) -> TrainingRun:
        plan = dataclasses.replace(
            make_plan("recompute", "offload", "keep"), weights=WeightsPlan(frozen=form, place=place), **(plan_changes or {})
        )
        workload = {"adapter": Adapter(rank=4, dropout=0.1), "sample_tokens": 4, "eval_batches": 1, "checkpoint_every_steps": 3}
        return TrainingRun(
            spec=make_spec(),
            plan=plan,
            workload=make_workload(**{**workload, **changes}),
            goal=Goal(device_budget_bytes=2**40),
            device="cpu",
            attempt=1,
            fence=7,
            job_folder=tmp_path / folder,
            weights_folder=None,
            token_file=tokens,
            tokenizer_file=tokenizer,
            resume_from=resume_from,
        )

    return make


def carry_out(run: TrainingRun) -> tuple[TrainingResult, list[dict[str, Any]]]:
    messages: list[Any] = []
    result = train(run, report=messages.append, should_stop=lambda: False)
    return result, messages


def adapters_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    return load_file(artifacts_of(run.job_folder) / "adapter" / "adapter_model.safetensors")


def test_a_job_leaves_its_adapters_and_the_merged_model(make_run: Callable[..., TrainingRun]) -> None:
    run = make_run()
    result, _ = carry_out(run)
    assert result.outcome == "succeeded"
    assert result.summary["validation_loss"] < result.summary["validation_loss_start"]
    kinds = {(artifact.kind, artifact.name) for artifact in result.artifacts}
    assert kinds >= {("model", "model.safetensors"), ("adapter", "adapter_model.safetensors"), ("sample", "sample.txt")}
    assert all(name.startswith("base_model.model.model.layers.") for name in adapters_of(run))
    json.dumps(result.to_json(), allow_nan=False)


def test_checkpoints_hold_adapters_alone_and_name_the_frozen_weights(make_run: Callable[..., TrainingRun]) -> None:
    run = make_run()
    _, messages = carry_out(run)
    folder = next(m["folder"] for m in messages if m["type"] == "checkpoint")
    checkpoint = read_checkpoint(run.job_folder / folder)
    assert all("lora_" in name for name in checkpoint.load("model"))
    assert len(checkpoint.facts["frozen_sha256"]) == 64


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_job_resumed_from_its_checkpoint_ends_with_the_same_bits(
    make_run: Callable[..., TrainingRun], place: str
) -> None:
    through = make_run(folder="through", place=place)
    _, messages = carry_out(through)
    first = through.job_folder / next(m["folder"] for m in messages if m["type"] == "checkpoint")
    resumed = make_run(folder="resumed", place=place, resume_from=str(first))
    _, messages = carry_out(resumed)
    assert {"type": "started", "resumed_from_step": 3} in messages
    expected = adapters_of(through)
    for name, tensor in adapters_of(resumed).items():
        assert tensor.equal(expected[name]), name


def test_a_checkpoint_of_other_frozen_weights_is_refused(make_run: Callable[..., TrainingRun]) -> None:
    through = make_run(folder="through")
    _, messages = carry_out(through)
    first = through.job_folder / next(m["folder"] for m in messages if m["type"] == "checkpoint")
    with pytest.raises(CheckpointInvalid, match="was trained on other frozen weights than those of this model and plan"):
        carry_out(make_run(folder="other", form="int8", resume_from=str(first)))


def test_adapters_train_with_their_state_off_the_device(make_run: Callable[..., TrainingRun]) -> None:
    away = {"gradients": GradientsPlan(choice="host"), "optimizer_state": OptimizerStatePlan(place="host")}
    here, there = make_run(folder="here"), make_run(folder="there", place="disk", plan_changes=away)
    carry_out(here)
    carry_out(there)
    expected = adapters_of(here)
    for name, tensor in adapters_of(there).items():
        assert tensor.equal(expected[name]), name
