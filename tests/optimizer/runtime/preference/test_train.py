"""Whole jobs on pairs: margins grow, and a stopped run goes on with the same bits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.data.bundled import TOKENIZER_FILE
from optimizer.data.tokens import tokenize_dataset
from optimizer.goal import Goal
from optimizer.models.spec import read_model_spec
from optimizer.runtime.job.train import train
from optimizer.runtime.job.training_run import TrainingRun
from optimizer.workload import Adapter
from tests.optimizer.runtime.tiny import CONFIGS, make_plan, make_workload

CONFIG = {**CONFIGS["llama"], "vocab_size": 4096}


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    words = ("bread", "water", "light", "stone", "river", "tree", "salt", "fire")
    rows = [
        {"prompt": f"Say {word}.", "chosen": f"Blessed be the {word}.", "rejected": f"I will not say {word} now."}
        for word in words
    ]
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tokenize_dataset(
        file=file, format="jsonl", tokenizer_file=TOKENIZER_FILE, folder=folder / "tokens", loss_on="assistant", pairs=True
    ).folder


def make_run(token_file: Path, folder: Path, objective: Any, *, num_steps: int = 30) -> TrainingRun:
    return TrainingRun(
        spec=read_model_spec(CONFIG),
        plan=make_plan(),
        workload=make_workload(
            sequence_length=32,
            num_steps=num_steps,
            objective=objective,
            packing="off",
            loss_on="assistant",
            learning_rate=1e-2 if objective == "dpo" else 3e-3,
            adapter=Adapter(rank=4) if objective == "dpo" else None,
            sample_tokens=0,
            eval_batches=1,
            eval_every_steps=0,
            checkpoint_every_steps=0,
        ),
        goal=Goal(device_budget_bytes=2**40),
        device="cpu",
        attempt=1,
        fence=1,
        job_folder=folder / "job",
        weights_folder=None,
        token_file=token_file,
        tokenizer_file=TOKENIZER_FILE,
    )


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_margins_grow_and_the_loss_falls(token_file: Path, tmp_path: Path, objective: str) -> None:
    messages: list[Any] = []
    result = train(make_run(token_file, tmp_path, objective), report=messages.append, should_stop=lambda: False)
    steps = [message for message in messages if message.get("kind") == "step"]
    assert len(steps) == 30
    assert result.summary["validation_loss"] < result.summary["validation_loss_start"]
    margins = [step["reward_margin"] for step in steps]
    assert sum(margins[-5:]) / 5 > sum(margins[:5]) / 5 + 0.05
    assert all(step["reward_accuracy"] == 1 for step in steps[-5:])
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_the_first_loss_of_dpo_is_that_of_answers_equally_likely_made(token_file: Path, tmp_path: Path) -> None:
    messages: list[Any] = []
    train(make_run(token_file, tmp_path, "dpo", num_steps=1), report=messages.append, should_stop=lambda: False)
    step = next(message for message in messages if message.get("kind") == "step")
    assert step["loss"] == pytest.approx(0.693147, abs=1e-6)
    assert step["reward_margin"] == 0


def test_a_stopped_run_goes_on_with_the_same_bits(token_file: Path, tmp_path: Path) -> None:
    whole = train(make_run(token_file, tmp_path / "a", "dpo", num_steps=6), report=lambda _: None, should_stop=lambda: False)
    messages: list[Any] = []
    run = make_run(token_file, tmp_path / "b", "dpo", num_steps=6)
    stopped = train(run, report=messages.append, should_stop=lambda: any(m.get("step") == 3 for m in messages))
    assert stopped.outcome == "drained"
    resumed = train(dataclasses.replace(run, resume_from="newest"), report=lambda _: None, should_stop=lambda: False)
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
