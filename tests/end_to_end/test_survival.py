"""A real job on real processes: whatever is killed, it ends with the weights of an undisturbed run, bit for bit."""

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optimizer.estimate.prediction import Prediction
from tests.breadth import SURVIVAL
from tests.end_to_end.site.stack import Jobs, Stack, running_stack
from tests.worker.processes import is_alive, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.breadth(SURVIVAL)]

NUM_STEPS = 40
CHECKPOINT_EVERY = 5
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
WORKLOAD: dict[str, Any] = {
    "sequence_length": 64,
    "global_batch_size": 4,
    "num_steps": NUM_STEPS,
    "warmup_steps": 4,
    "learning_rate": 1e-3,
    "eval_every_steps": 0,
    "eval_batches": 1,
    "checkpoint_every_steps": CHECKPOINT_EVERY,
    "sample_tokens": 4,
    "seed": 3,
}
PLAN: dict[str, Any] = {
    "batch": {"micro_batch_size": 4, "accumulation_steps": 1},
    "activations": {"per_block": ["keep", "recompute"]},
}
TEXT = "In the beginning God created the heaven and the earth, and the earth was without form, and void.\n" * 400
ROOMY_BYTES = 1 << 30
TIGHT_BYTES = 8 << 20
"""Holds the weights, and not a step."""


class TrainJobs(Jobs):
    """The stack, one model and one dataset, and what a test asks of a job."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack)
        self.model = stack.ask("create_model", config=CONFIG)
        self.dataset = stack.ask("create_dataset", text=TEXT)

    def start(
        self, *, budget_bytes: int = ROOMY_BYTES, prediction: Any = None, forbid: tuple[str, ...] = (), **workload: Any
    ) -> str:
        return self.stack.ask(
            "create_job",
            model=self.model,
            dataset=self.dataset,
            workload={**WORKLOAD, **workload},
            plan=PLAN,
            budget_bytes=budget_bytes,
            kind="train",
            prediction=prediction,
            forbid=forbid,
        )

    def wait_until_trained(self, job: str, *, step: int) -> int:
        """Until there is a checkpoint of ``step`` or later, still far from the end; the process that trains."""
        folder = self.stack.home / "jobs" / job / "checkpoints"

        def has_trained() -> bool:
            return any(int(path.name.split("-")[1]) >= step for path in folder.glob("step-*"))

        wait_for(has_trained, what=f"a checkpoint of step {step} of {job}", timeout_s=90)
        return self.wait_for_process(job)

    def log(self, job: str) -> str:
        """Output of the processes of all attempts, for the message of a failed assertion."""
        files = sorted((self.stack.home / "jobs" / job / "attempts").glob("*/log.txt"))
        return "\n".join(f"--- attempt {file.parent.name}\n{file.read_text()[-3000:]}" for file in files)

    def steps(self, job: str) -> list[int]:
        """Each step once, as a reader shows them."""
        return sorted({row["step"] for row in self.stack.ask("samples", job=job, kind="step")})


@pytest.fixture(scope="module")
def jobs() -> Iterator[TrainJobs]:
    with running_stack() as stack:
        yield TrainJobs(stack)


@pytest.fixture(autouse=True)
def _logs(jobs: TrainJobs) -> Iterator[None]:
    yield
    print(jobs.stack.logs())  # shown where the test failed


@pytest.fixture(scope="module")
def undisturbed(jobs: TrainJobs) -> dict[str, Any]:
    """The end of a run that nobody disturbed, and its job."""
    job = jobs.start()
    row = jobs.wait_for_end(job)
    assert row["state"] == "succeeded", f"{row}\n{jobs.log(job)}"
    assert row["attempt"] == 1
    assert jobs.steps(job) == list(range(1, NUM_STEPS + 1))
    return {**row, "job": job}


def assert_same_end(jobs: TrainJobs, job: str, undisturbed: Any) -> dict[str, Any]:
    row = jobs.wait_for_end(job)
    assert row["state"] == "succeeded", f"{row}\n{jobs.log(job)}"
    assert row["summary"]["weights_sha256"] == undisturbed["summary"]["weights_sha256"]
    assert jobs.steps(job) == list(range(1, NUM_STEPS + 1))
    return row


def test_a_killed_job_process_costs_nothing_but_time(jobs: TrainJobs, undisturbed: Any) -> None:
    job = jobs.start()
    os.kill(jobs.wait_until_trained(job, step=CHECKPOINT_EVERY), signal.SIGKILL)
    row = assert_same_end(jobs, job, undisturbed)
    first, second = jobs.attempts(job)
    assert row["failed_attempts"] == 1
    assert (first["outcome"], first["exit_code"]) == ("worker_lost", -signal.SIGKILL)
    assert second["resumed_from_step"] >= CHECKPOINT_EVERY


def test_a_killed_worker_takes_its_job_process_along_and_the_next_one_goes_on(
    jobs: TrainJobs, undisturbed: Any
) -> None:
    job = jobs.start()
    pid = jobs.wait_until_trained(job, step=CHECKPOINT_EVERY)
    jobs.stack.kill("worker")
    wait_for(lambda: not is_alive(pid), what="the end of the job's process")
    jobs.stack.start_worker()
    assert_same_end(jobs, job, undisturbed)
    first, second = jobs.attempts(job)
    assert first["outcome"] == "worker_lost"
    assert second["resumed_from_step"] >= CHECKPOINT_EVERY


def test_a_job_starts_without_a_broker_and_notices_neither_its_coming_nor_its_end(jobs: TrainJobs, undisturbed: Any) -> None:
    worker = jobs.stack.pid("worker")
    jobs.stack.kill("valkey")
    try:
        job = jobs.start()
        wait_for(lambda: jobs.attempts(job), what=f"an attempt of {job} without a hint")
        jobs.stack.start_valkey()
        jobs.wait_until_trained(job, step=CHECKPOINT_EVERY)
        jobs.stack.kill("valkey")
        row = assert_same_end(jobs, job, undisturbed)
    finally:
        if not jobs.stack.is_started("valkey"):
            jobs.stack.start_valkey()
    assert row["attempt"] == 1
    assert is_alive(worker)


def test_a_paused_job_and_a_drained_worker_save_first_and_no_attempt_counts_as_failed(
    jobs: TrainJobs, undisturbed: Any
) -> None:
    job = jobs.start()
    jobs.wait_until_trained(job, step=CHECKPOINT_EVERY)
    jobs.stack.ask("pause", job=job)
    jobs.wait_for_event(job, "requeued")
    assert jobs.show(job)["state"] == "queued"
    jobs.stack.ask("resume", job=job)
    wait_for(
        lambda: len(jobs.attempts(job)) == 2 and jobs.attempts(job)[-1]["pid"], what="a second attempt", timeout_s=60
    )
    assert jobs.stack.terminate("worker") == 0
    assert jobs.show(job)["state"] == "queued"
    jobs.stack.start_worker()
    row = assert_same_end(jobs, job, undisturbed)
    assert row["failed_attempts"] == 0
    assert [attempt["outcome"] for attempt in jobs.attempts(job)] == ["paused", "drained", "succeeded"]


def test_a_worker_that_slept_past_its_lease_changes_nothing_when_it_wakes(jobs: TrainJobs, undisturbed: Any) -> None:
    job = jobs.start()
    pid = jobs.wait_until_trained(job, step=CHECKPOINT_EVERY)
    jobs.stack.halt("worker")
    try:
        jobs.wait_for_event(job, "requeued")
    finally:
        jobs.stack.wake("worker")
    assert_same_end(jobs, job, undisturbed)
    assert not is_alive(pid)
    first, second = jobs.attempts(job)
    # a worker halted within a write is woken and halted again; the pause of the two can be the one that its process ended for
    assert first["outcome"] in ("worker_lost", "drained")
    assert second["outcome"] == "succeeded"


def test_a_process_that_wakes_within_its_export_leaves_what_the_next_attempt_left(jobs: TrainJobs, undisturbed: Any) -> None:
    job = jobs.start()
    pid = jobs.wait_until_trained(job, step=CHECKPOINT_EVERY)
    folder = jobs.stack.home / "jobs" / job
    result = folder / "attempts" / "1" / ".result.json"
    os.mkfifo(result)  # the last that it writes, for which it waits here
    wait_for(lambda: list(folder.glob("artifacts/*/tensorboard/*")), what="all else that it leaves", timeout_s=60)
    os.kill(pid, signal.SIGSTOP)
    jobs.stack.halt("worker")
    jobs.stack.start_worker("other", HEADROOM_WORKER_NAME="other")
    try:
        assert_same_end(jobs, job, undisturbed)
        reader = os.open(result, os.O_RDONLY | os.O_NONBLOCK)
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: not is_alive(pid), what="the end of what came too late")
        os.close(reader)
    finally:
        jobs.stack.wake("worker")
        jobs.stack.terminate("other")
    rows = {jobs.stack.home / row["file"]: row["sha256"] for row in jobs.stack.ask("artifacts", job=job)}
    wait_for(lambda: set(files_below(folder / "artifacts")) == set(rows), what="nothing but what the next attempt left")
    assert {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in rows} == rows
    assert [attempt["outcome"] for attempt in jobs.attempts(job)][1:] == ["succeeded"]


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_job_whose_worker_is_halted_stops_itself_before_it_is_given_away(jobs: TrainJobs) -> None:
    job = jobs.start(num_steps=5000, checkpoint_every_steps=0)
    wait_for(lambda: jobs.show(job)["step"] >= 3, what="step 3", timeout_s=60)
    pid = jobs.attempts(job)[-1]["pid"]
    samples = jobs.stack.home / "jobs" / job / "attempts" / "1" / "samples.jsonl"
    jobs.stack.halt("worker")
    try:
        jobs.wait_for_event(job, "requeued")
        written = samples.read_bytes()
        wait_for(lambda: not is_alive(pid), what="the job's process to end itself, for nobody else can")
        jobs.stack.ask("cancel", job=job, mode="discard")
    finally:
        jobs.stack.wake("worker")
    jobs.wait_for_end(job)
    assert samples.read_bytes() == written


def test_a_job_that_runs_out_of_memory_goes_on_from_its_checkpoint_under_another_plan(
    jobs: TrainJobs, undisturbed: Any
) -> None:
    (whole,) = jobs.attempts(undisturbed["job"])
    stages = {name: peaks["device_peak_bytes"] for name, peaks in whole["measured"]["stages"].items()}
    # holds the first step, which has no optimizer state yet, and no other
    budget_bytes = (stages["first_step"] + stages["steady_step"]) // 2
    too_low = Prediction(
        device_peak_bytes=budget_bytes // 2,
        device_peak_low_bytes=budget_bytes // 2,
        device_peak_high_bytes=budget_bytes // 2,
        device_bytes_by_category={},
        host_peak_bytes=0,
        peak_moment="forward",
        step_ms=1000.0,
        step_low_ms=1.0,
        step_high_ms=1e6,
        lane_busy_ms={},
        exposed_copy_ms=0.0,
        tokens_per_s=1.0,
        total_s=1.0,
        timeline=(),
        time_source="table",
    )
    # micro-batches stay as they are: another split sums in another order
    forbid = ("accumulate", "chunked_loss")
    job = jobs.start(
        budget_bytes=budget_bytes, prediction=too_low.to_json(), forbid=forbid, checkpoint_every_steps=1
    )
    row = assert_same_end(jobs, job, undisturbed)
    first, *_, last = jobs.attempts(job)
    assert first["outcome"] == "out_of_device_memory"
    assert first["error"]["fields"]["stage"] == "steady_step"
    assert last["resumed_from_step"] >= 1
    assert last["measured"]["device_peak_bytes"] <= budget_bytes
    assert row["failed_attempts"] == 0
    kinds = [event["kind"] for event in jobs.stack.ask("events", job=job)]
    assert kinds.index("requeued") < kinds.index("replanned") < kinds.index("succeeded")


def cancel(jobs: TrainJobs, job: str, *, mode: str) -> None:
    """Cancel a job that trains, and see that it ends so and leaves no process."""
    pid = jobs.wait_for_process(job)
    jobs.stack.ask("cancel", job=job, mode=mode)
    row = jobs.wait_for_end(job)
    assert (row["state"], row["reason"]) == ("cancelled", "cancelled_by_user")
    assert not is_alive(pid)


def test_a_cancelled_job_saves_when_asked_to(jobs: TrainJobs) -> None:
    job = jobs.start(num_steps=5000, checkpoint_every_steps=0)
    wait_for(lambda: jobs.show(job)["step"] >= 3, what="step 3", timeout_s=60)
    cancel(jobs, job, mode="save")
    assert len(jobs.stack.ask("checkpoints", job=job)) == 1


def test_a_new_model_is_profiled_while_a_job_trains_which_saves_nothing_when_it_is_discarded(jobs: TrainJobs) -> None:
    training = jobs.start(num_steps=5000, checkpoint_every_steps=0)
    wait_for(lambda: jobs.show(training)["step"] >= 3, what="step 3", timeout_s=60)
    profiling = jobs.stack.ask("request_profile", model=jobs.model)
    assert jobs.wait_for_end(profiling)["state"] == "succeeded"
    assert jobs.show(training)["state"] == "running"
    cancel(jobs, training, mode="discard")
    assert jobs.stack.ask("checkpoints", job=training) == []


def test_a_plan_over_its_budget_fails_by_name_with_the_sizes_by_category(jobs: TrainJobs) -> None:
    job = jobs.start(budget_bytes=TIGHT_BYTES)
    row = jobs.wait_for_end(job)
    assert (row["state"], row["reason"]) == ("failed", "out_of_device_memory")
    assert row["failed_attempts"] == 1
    fields = row["error"]["fields"]
    assert fields["budget_bytes"] == TIGHT_BYTES
    assert fields["in_use_bytes"] == sum(fields["bytes_by_category"].values())
    assert fields["in_use_bytes"] + fields["requested_bytes"] > fields["budget_bytes"]
