"""transformers' own Trainer under a plan, and without: the same loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from optimizer.base.errors import InvalidPlan
from optimizer.models.build import build_model
from optimizer.runtime.job.apply import apply
from optimizer.runtime.job.hf_trainer import PlanCallback, PlanOptimizer
from tests.optimizer.runtime.tiny import make_plan, make_spec, make_workload

PLAN = make_plan(
    "recompute", "keep", "offload", gradients="host", state_place="host", micro_batch_size=2, accumulation_steps=2
)
WORKLOAD = make_workload(global_batch_size=4, sequence_length=16, max_grad_norm=1.0, learning_rate=1e-2)


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self._ids = torch.randint(512, (64, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "seed": 0,
    }
    return TrainingArguments(**{**settings, **changed})


def losses_of(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_learns_under_a_plan_as_it_does_without(tmp_path: Path) -> None:
    plain = Trainer(build_model(make_spec(), seed=0), arguments(tmp_path, max_grad_norm=1.0), train_dataset=Rows())
    expected = losses_of(plain)
    model = build_model(make_spec(), seed=0)
    with apply(model, PLAN, workload=WORKLOAD, budget_bytes=10**9) as run:
        planned = Trainer(
            model,
            arguments(tmp_path),
            train_dataset=Rows(),
            optimizers=(PlanOptimizer(run), None),
            callbacks=[PlanCallback(run)],
        )
        found = losses_of(planned)
    assert found == pytest.approx(expected, rel=2e-3)
    steps = [entry for entry in planned.state.log_history if "loss" in entry]
    assert all(entry["device_peak_bytes"] > 0 and entry["host_peak_bytes"] > 0 for entry in steps)


def test_the_trainer_resumes_a_plan_from_its_own_checkpoint(tmp_path: Path) -> None:
    def train(folder: Path, *, resume: bool, max_steps: int) -> list[torch.Tensor]:
        model = build_model(make_spec(), seed=0)
        with apply(model, PLAN, workload=WORKLOAD) as run:
            trainer = Trainer(
                model,
                arguments(folder, max_steps=max_steps, save_strategy="steps", save_steps=3),
                train_dataset=Rows(),
                optimizers=(PlanOptimizer(run), None),
                callbacks=[PlanCallback(run)],
            )
            trainer.train(resume_from_checkpoint=resume or None)
        return [p.detach().clone() for p in model.parameters()]

    whole = train(tmp_path / "whole", resume=False, max_steps=6)
    train(tmp_path / "parts", resume=False, max_steps=3)
    resumed = train(tmp_path / "parts", resume=True, max_steps=6)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size is 4; under this plan it must be 2"),
        ({"max_grad_norm": 1.0}, "max_grad_norm is 1.0; under this plan it must be 0"),
        ({"bf16": True}, "bf16 is True; under this plan it must be False"),
        ({"activation_checkpointing": True}, "gradient_checkpointing is True; under this plan it must be False"),
    ],
)
def test_arguments_that_contradict_the_plan_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    model = build_model(make_spec(), seed=0)
    with apply(model, PLAN, workload=WORKLOAD) as run:
        trainer = Trainer(
            model,
            arguments(tmp_path, **changed),
            train_dataset=Rows(),
            optimizers=(PlanOptimizer(run), None),
            callbacks=[PlanCallback(run)],
        )
        with pytest.raises(InvalidPlan, match=message):
            trainer.train()


def test_the_trainer_may_not_save_a_model_whose_weights_are_elsewhere(tmp_path: Path) -> None:
    model = build_model(make_spec(), seed=0)
    plan = make_plan(gradients="host", state_place="host", weights_place="host", accumulation_steps=2)
    with apply(model, plan, workload=WORKLOAD) as run:
        optimizers = (PlanOptimizer(run), None)
        settings = arguments(tmp_path, save_strategy="steps")
        trainer = Trainer(
            model, settings, train_dataset=Rows(), optimizers=optimizers, callbacks=[PlanCallback(run)]
        )
        with pytest.raises(InvalidPlan, match="save_strategy is steps; under this plan it must be no"):
            trainer.train()
