"""Jobs that train adapters on one base model have its streamed weights on the host once, to the bits that each has alone."""

import dataclasses
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optimizer.goal import Goal
from optimizer.models.build import build_model
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.train import train
from optimizer.runtime.job.training_run import TrainingRun
from optimizer.workload import Adapter
from tests.breadth import JOBS_OF_ONE_BASE
from tests.optimizer.runtime.ranks.rank_process import list_shared_memory
from tests.optimizer.runtime.tiny import (
    artifacts_of,
    make_plan,
    make_spec,
    make_workload,
    write_token_file,
    write_tokenizer,
)

pytestmark = pytest.mark.breadth(JOBS_OF_ONE_BASE)

STEPS = 6
PAUSED_AT = 3
LIMIT_S = 120.0


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., TrainingRun]:
    tokens = write_token_file(tmp_path / "tokens")
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    for seed, folder in enumerate(("base", "other-base")):
        published: Any = build_model(make_spec(), seed=seed, dtype=torch.bfloat16)
        published.save_pretrained(tmp_path / folder)

    def make(
        folder: str, *, base: str = "base", shares: bool = True, rank: int = 4, form: str = "int8", place: str = "host"
    ) -> TrainingRun:
        workload = {"adapter": Adapter(rank=rank), "num_steps": STEPS, "sample_tokens": 0, "checkpoint_every_steps": STEPS}
        return TrainingRun(
            spec=make_spec(),
            plan=dataclasses.replace(make_plan("keep"), weights=WeightsPlan(frozen=form, place=place)),
            workload=make_workload(mode="finetune", **workload),
            goal=Goal(device_budget_bytes=2**40),
            device="cpu",
            attempt=1,
            fence=7,
            job_folder=tmp_path / folder,
            weights_folder=tmp_path / base,
            token_file=tokens,
            tokenizer_file=tokenizer,
            base_folder=tmp_path / "bases" if shares else None,
        )

    return make


def carry_out(run: TrainingRun, *, waits: bool = False) -> None:
    """In a process of its own: its messages go to a file, its memory to another, and in the midst it waits for a file."""
    run.job_folder.mkdir(parents=True)

    def report(message: dict[str, Any]) -> None:
        with (run.job_folder / "messages.jsonl").open("a") as stream:
            stream.write(json.dumps(message) + "\n")
        if message.get("kind") == "step" and message["step"] == PAUSED_AT:
            (run.job_folder / "new.json").write_text(json.dumps(list_shared_memory()))
            (run.job_folder / "new.json").rename(run.job_folder / "mapped.json")
            while waits and not (run.job_folder / "go").exists():
                time.sleep(0.02)

    result = train(run, report=report, should_stop=lambda: False)
    (run.job_folder / "host_bytes").write_text(str(result.measured.host_peak_bytes))


def begin(run: TrainingRun, *, waits: bool = False) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=carry_out, args=(run,), kwargs={"waits": waits})
    process.start()
    return process


def mapped_by(run: TrainingRun, process: BaseProcess) -> list[int]:
    """Inodes of the shared memory that the run has in the midst of its steps, once it is there."""
    end_s = time.monotonic() + LIMIT_S
    while not (run.job_folder / "mapped.json").exists():
        assert process.is_alive() or (run.job_folder / "mapped.json").exists(), f"it ended with {process.exitcode}"
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return sorted({inode for inode, _ in json.loads((run.job_folder / "mapped.json").read_text())})


def finish(run: TrainingRun, process: BaseProcess) -> None:
    (run.job_folder / "go").touch()
    process.join(LIMIT_S)
    assert process.exitcode == 0


def found_base(run: TrainingRun) -> bool:
    lines = (run.job_folder / "messages.jsonl").read_text().splitlines()
    return any("on the host already" in json.loads(line).get("message", "") for line in lines)


def assert_same_end(one: TrainingRun, other: TrainingRun) -> None:
    ends = [load_file(artifacts_of(run.job_folder) / "adapter" / "adapter_model.safetensors") for run in (one, other)]
    assert ends[0].keys() == ends[1].keys()
    assert all(tensor.equal(ends[1][name]) for name, tensor in ends[0].items())
    assert (one.job_folder / "host_bytes").read_text() == (other.job_folder / "host_bytes").read_text()


def test_jobs_of_one_base_have_one_copy_while_any_of_them_runs_and_end_as_they_do_alone(
    make_run: Callable[..., TrainingRun],
) -> None:
    first, second, third = make_run("first"), make_run("second"), make_run("third", rank=8)
    other, alone, late = make_run("other", base="other-base"), make_run("alone", shares=False), make_run("late")
    maker = begin(first, waits=True)
    made = mapped_by(first, maker)
    user = begin(second, waits=True)
    assert mapped_by(second, user) == made
    assert len(made) == 1
    # The copy outlives the job that made it.
    assert maker.pid is not None
    os.kill(maker.pid, signal.SIGKILL)
    maker.join(LIMIT_S)
    last = begin(third, waits=True)
    assert mapped_by(third, last) == made
    carry_out(other)
    assert mapped_by(other, user) not in ([], made)
    finish(second, user)
    finish(third, last)
    # It is gone with the last of them, and the next job makes another.
    carry_out(late)
    carry_out(alone)
    assert list_shared_memory() == []
    assert [found_base(run) for run in (first, second, third, other, late)] == [False, True, True, False, False]
    assert_same_end(alone, second)
    assert_same_end(alone, late)


def test_a_job_killed_while_it_fills_leaves_the_filling_to_the_next(
    make_run: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    killed = make_run("killed")
    process = multiprocessing.get_context("spawn").Process(target=fill_until_killed, args=(killed,))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGKILL
    # It had the lock, and nobody was told of what it had made.
    assert [file.suffix for file in (tmp_path / "bases").iterdir()] == [".lock"]
    alone, after = make_run("alone", shares=False), make_run("after")
    carry_out(alone)
    carry_out(after)
    assert not found_base(after)
    assert_same_end(alone, after)


def fill_until_killed(run: TrainingRun) -> None:
    """Train, but be killed as the second home gets its numbers."""
    from optimizer.runtime.tiers.homes import OffDeviceBytes

    write = OffDeviceBytes.write
    written: list[OffDeviceBytes] = []

    def write_once(home: OffDeviceBytes, source: torch.Tensor, *, dtype: torch.dtype) -> None:
        if written:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(home)
        write(home, source, dtype=dtype)

    OffDeviceBytes.write = write_once  # type: ignore[method-assign, assignment]
    carry_out(run)


@pytest.mark.parametrize("place", ["device", "disk"])
def test_nothing_is_shared_where_nothing_streams_from_the_host(
    make_run: Callable[..., TrainingRun], place: str, tmp_path: Path
) -> None:
    run = make_run("run", place=place)
    carry_out(run)
    assert json.loads((run.job_folder / "mapped.json").read_text()) == []
    assert not (tmp_path / "bases").exists()
