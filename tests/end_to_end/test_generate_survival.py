"""A real generate job on real processes: whatever is killed, each prompt is answered once, as in an undisturbed run."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.breadth import SURVIVAL
from tests.end_to_end.site.stack import Jobs, Stack, running_stack
from tests.end_to_end.site.writer import CONFIG, write_weights
from tests.worker.processes import is_alive, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.breadth(SURVIVAL)]

NUM_PROMPTS = 60
BATCH_SIZE = 2
NEW_TOKENS = 48
ENOUGH = 6
"""Lines that are done when something is killed: more than one pass, far from all."""
PROMPTS = "".join(json.dumps({"prompt": f"And it came to pass on day {number}"}) + "\n" for number in range(NUM_PROMPTS))
PLAN = {"batch_size": BATCH_SIZE}
ROOMY_BYTES = 1 << 30


class GenerateJobs(Jobs):
    """The stack, one model and its prompts, and what a test asks of a job."""

    end_within_s = 300

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack)
        write_weights(stack.home / "models" / "writer")
        self.model = stack.ask("create_model", config=CONFIG, folder="models/writer", has_weights=True)
        self.prompts = stack.ask("create_prompts", text=PROMPTS)

    def start(self, **workload: Any) -> str:
        return self.stack.ask(
            "create_job",
            model=self.model,
            dataset=self.prompts,
            workload={"max_new_tokens": NEW_TOKENS, "temperature": 0.8, "seed": 2, **workload},
            plan=PLAN,
            budget_bytes=ROOMY_BYTES,
            kind="generate",
            num_steps=NUM_PROMPTS,
        )

    def parts(self, job: str) -> list[dict]:
        """Every finished line that is on the disk, of all attempts; a torn one is none."""
        files = sorted((self.stack.home / "jobs" / job / "results").glob("part-*.jsonl"))
        lines = [line for file in files for line in file.read_bytes().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def wait_until_written(self, job: str) -> int:
        """Until some lines are done, still far from the end; the process that generates."""
        wait_for(lambda: len(self.parts(job)) >= ENOUGH, what=f"{ENOUGH} lines of {job}", timeout_s=180)
        return self.wait_for_process(job)

    def texts(self, job: str) -> list[str]:
        [results] = [artifact for artifact in self.stack.ask("artifacts", job=job) if artifact["kind"] == "results"]
        lines = (self.stack.home / results["file"]).read_text().splitlines()
        return [json.loads(line)["text"] for line in lines]


@pytest.fixture(scope="module")
def jobs() -> Iterator[GenerateJobs]:
    with running_stack() as stack:
        yield GenerateJobs(stack)


@pytest.fixture(autouse=True)
def _logs(jobs: GenerateJobs) -> Iterator[None]:
    yield
    print(jobs.stack.logs())  # shown where the test failed


@pytest.fixture(scope="module")
def undisturbed(jobs: GenerateJobs) -> list[str]:
    """The answers of a run that nobody disturbed."""
    job = jobs.start()
    row = jobs.wait_for_end(job)
    assert (row["state"], row["attempt"], row["step"]) == ("succeeded", 1, NUM_PROMPTS), f"{row}\n{jobs.stack.logs()}"
    samples = jobs.stack.ask("samples", job=job, kind="generate")
    assert samples[-1]["data"]["prompts_done"] == NUM_PROMPTS
    return jobs.texts(job)


def assert_same_end(jobs: GenerateJobs, job: str, undisturbed: list[str]) -> dict[str, Any]:
    row = jobs.wait_for_end(job)
    assert row["state"] == "succeeded", f"{row}\n{jobs.stack.logs()}"
    assert jobs.texts(job) == undisturbed
    done = [line["index"] for line in jobs.parts(job)]
    assert sorted(done) == list(range(NUM_PROMPTS)), "a line was done twice, or not at all"
    return row


def test_a_killed_job_process_costs_no_finished_line(jobs: GenerateJobs, undisturbed: list[str]) -> None:
    job = jobs.start()
    os.kill(jobs.wait_until_written(job), signal.SIGKILL)
    row = assert_same_end(jobs, job, undisturbed)
    first, second = jobs.attempts(job)
    assert row["failed_attempts"] == 1
    assert (first["outcome"], first["exit_code"]) == ("worker_lost", -signal.SIGKILL)
    assert second["resumed_from_step"] >= ENOUGH


def test_a_paused_job_and_a_drained_worker_keep_what_is_done_and_no_attempt_counts_as_failed(
    jobs: GenerateJobs, undisturbed: list[str]
) -> None:
    job = jobs.start()
    jobs.wait_until_written(job)
    jobs.stack.ask("pause", job=job)
    jobs.wait_for_event(job, "requeued")
    assert jobs.show(job)["state"] == "queued"
    jobs.stack.ask("resume", job=job)
    wait_for(lambda: len(jobs.attempts(job)) == 2 and jobs.attempts(job)[-1]["pid"], what="a second attempt", timeout_s=60)
    assert jobs.stack.terminate("worker") == 0
    jobs.stack.start_worker()
    row = assert_same_end(jobs, job, undisturbed)
    assert row["failed_attempts"] == 0
    assert jobs.attempts(job)[0]["outcome"] == "paused"


@pytest.mark.parametrize("mode", ["save", "discard"])
def test_a_cancelled_job_leaves_a_file_of_what_is_done_only_when_asked_to(jobs: GenerateJobs, mode: str) -> None:
    job = jobs.start(max_new_tokens=96)
    pid = jobs.wait_until_written(job)
    jobs.stack.ask("cancel", job=job, mode=mode)
    row = jobs.wait_for_end(job)
    assert (row["state"], row["reason"]) == ("cancelled", "cancelled_by_user")
    assert not is_alive(pid)
    if mode == "save":
        assert ENOUGH <= len(jobs.texts(job)) == row["step"] < NUM_PROMPTS
    else:
        assert jobs.stack.ask("artifacts", job=job) == []
