"""A generate job on several devices: the file of one device, whoever wrote what, also after a rank was killed, or a stop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from optimizer.base.serialize import to_json
from optimizer.base.units import MIB
from optimizer.goal import GenerationGoal
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import GenerationRequest
from tests.breadth import SEVERAL_DEVICES
from tests.optimizer.runtime.tiny import artifacts_of
from tests.webapp.generation import CONFIG
from worker.run.exit_codes import EXIT_DONE, EXIT_DRAINED
from worker.run.ranks.generating import GeneratingRank, measured_together
from worker.run.results import OtherParts, Result, ResultWriter

ONE = GenerationPlan(batch_size=2)
CUT = replace(ONE, num_micro_batches=2, layout=GenerationLayout(stage_blocks=(1, 1)))
COPIES = replace(ONE, weights=WeightsPlan(place="host"), layout=GenerationLayout(num_replicas=2))
NEW_TOKENS = 40
NUM_PROMPTS = 48
"""So many that a busy machine has some left when it looks again after the first."""
LINES = [*({"prompt": "word " * (index % 8 + 1), "id": f"line {index}"} for index in range(NUM_PROMPTS)), "nope"]

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    model = build_model(read_model_spec(CONFIG), dtype=torch.float32, device="cpu", seed=3)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return folder


class Job:
    """One generate job with a folder of its own; each attempt at it is a process, as its supervisor starts it."""

    def __init__(self, weights: Path, folder: Path, plan: GenerationPlan) -> None:
        self._weights, self.folder, self._plan = weights, folder, plan
        self._number = 0

    def begin(self) -> "subprocess.Popen[bytes]":
        self._number += 1
        attempt = self.folder / f"attempt-{self._number}"
        attempt.mkdir(parents=True)
        prompts = self.folder / "prompts.jsonl"
        prompts.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in LINES))
        document = {
            "job_id": "job_1",
            "attempt": self._number,
            "fence": self._number,
            "kind": "generate",
            "device": "cpu",
            "devices": ["cpu"] * self._plan.layout.num_devices,
            "config": CONFIG,
            "weights_folder": str(self._weights),
            "linked_files": [],
            "end_ids": [],
            "tokenizer_file": None,
            "chat_file": None,
            "prompts": {"file": str(prompts), "format": "prompts"},
            "workload": to_json(GenerationRequest(max_new_tokens=NEW_TOKENS, temperature=0.7, seed=5)),
            "goal": to_json(GenerationGoal(device_budget_bytes=64 * MIB, num_devices=2)),
            "plan": self._plan.to_json(),
            "job_folder": str(self.folder),
            "earlier_job_folders": [],
        }
        (attempt / "attempt.json").write_text(json.dumps(document))
        with (attempt / "log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "worker.run.runner", str(attempt)],
                env={**os.environ, "HEADROOM_NUM_THREADS": "2"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self) -> dict[str, Any]:
        process = self.begin()
        code = process.wait(timeout=600)
        assert code in (EXIT_DONE, EXIT_DRAINED), self.log
        return self.result

    @property
    def result(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / f"attempt-{self._number}" / "result.json").read_text())
        return document

    @property
    def log(self) -> str:
        return (self.folder / f"attempt-{self._number}" / "log").read_text()

    @property
    def results(self) -> str:
        return (artifacts_of(self.folder) / "results.jsonl").read_text()

    @property
    def num_written(self) -> int:
        return sum(part.read_bytes().count(b"\n") for part in (self.folder / "results").glob("part-*.jsonl"))

    def wait_until_written(self, number: int) -> None:
        end_s = time.monotonic() + 120
        while self.num_written < number:
            assert time.monotonic() < end_s, self.log
            time.sleep(0.01)


@pytest.fixture(scope="module")
def alone(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job on one device, done."""
    job = Job(weights, tmp_path_factory.mktemp("alone"), ONE)
    job.run()
    return job


@pytest.mark.breadth(SEVERAL_DEVICES)
@pytest.mark.parametrize("plan", [CUT, COPIES], ids=["cut", "copies"])
def test_several_devices_leave_the_file_of_one(plan: GenerationPlan, alone: Job, weights: Path, tmp_path: Path) -> None:
    job = Job(weights, tmp_path, plan)
    result = job.run()
    assert job.results == alone.results
    assert result["outcome"] == "succeeded"
    assert result["message"] == f"{len(LINES)} of {len(LINES)} prompts are done, 1 of them with an error"
    measured = result["measured"]
    assert measured["num_new_tokens"] == NUM_PROMPTS * NEW_TOKENS
    assert len(measured["rank_peak_bytes"]) == 2
    assert measured["device_peak_bytes"] == max(measured["rank_peak_bytes"])
    parts = sorted(part.name for part in (tmp_path / "results").glob("part-*.jsonl") if part.stat().st_size)
    assert parts == (["part-001-f1.jsonl"] if plan is CUT else ["part-001-f1-r1.jsonl", "part-001-f1.jsonl"])


@pytest.mark.breadth(SEVERAL_DEVICES)
@pytest.mark.parametrize("plan", [CUT, COPIES], ids=["cut", "copies"])
def test_a_killed_rank_or_a_stop_ends_all_ranks_and_the_next_attempt_goes_on_with_what_is_done(
    plan: GenerationPlan, alone: Job, weights: Path, tmp_path: Path
) -> None:
    job = Job(weights, tmp_path, plan)
    process = job.begin()
    job.wait_until_written(3)
    ranks = _children_of(process.pid)
    os.kill(ranks[-1], signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    num_after_kill = job.num_written

    process = job.begin()
    job.wait_until_written(num_after_kill + 1)
    process.terminate()
    assert process.wait(timeout=60) == EXIT_DRAINED, job.log
    assert job.result["outcome"] == "drained"
    assert num_after_kill < job.num_written < len(LINES)

    assert job.run()["outcome"] == "succeeded"
    assert job.results == alone.results
    assert job.num_written == len(LINES)


def test_lines_are_dealt_to_copies_and_given_whole_to_stages() -> None:
    lines, lengths = ["a", "bb", "ccc"], [(1, 4), (2, 4), (3, 4)]
    copies = [GeneratingRank(layout=COPIES.layout, rank=rank, num_ranks=2) for rank in (0, 1)]
    assert [rank.own_lines(lines, lengths) for rank in copies] == [["a", "ccc"], ["bb"]]
    stages = [GeneratingRank(layout=CUT.layout, rank=rank, num_ranks=2) for rank in (0, 1)]
    assert [rank.own_lines(lines, lengths) for rank in stages] == [lines, lines]
    assert [rank.writes for rank in (*copies, *stages)] == [True, True, True, False]


def test_answers_of_other_ranks_are_counted_as_they_come(tmp_path: Path) -> None:
    others = OtherParts(tmp_path, attempt=2, fence=7, num_ranks=2)
    others.look()
    assert others.num_done == 0
    with ResultWriter(tmp_path, attempt=2, fence=7, rank=1) as writer:
        writer.add([Result(index=0, record={}, completion_tokens=5)])
        others.look()
        part = tmp_path / "results" / "part-002-f7-r1.jsonl"
        with part.open("ab") as file:
            file.write(b'{"index": 1, ')
        others.look()
        assert (others.num_done, others.num_tokens, others.num_errors) == (1, 5, 0)
        with part.open("ab") as file:
            file.write(b'"record": {}, "is_error": true, "prompt_tokens": 0, "completion_tokens": 0}\n')
        others.look()
    assert (others.num_done, others.num_tokens, others.num_errors) == (2, 5, 1)


def test_what_ranks_measured_is_one_account_with_the_fullest_device() -> None:
    def measured(peak_bytes: int, num_tokens: int) -> dict[str, Any]:
        return {
            "device_peak_bytes": peak_bytes,
            "device_bytes_by_category": {"weights": peak_bytes},
            "host_peak_bytes": 0,
            "num_new_tokens": num_tokens,
            "total_s": 2.0,
            "passes": [{}],
        }

    together = measured_together([measured(5, 10), measured(7, 12)], COPIES.layout)
    assert (together["device_peak_bytes"], together["num_new_tokens"], together["tokens_per_s"]) == (7, 22, 11.0)
    assert together["passes"] == []
    assert measured_together([measured(5, 10), measured(7, 10)], CUT.layout)["num_new_tokens"] == 10


def _children_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]
