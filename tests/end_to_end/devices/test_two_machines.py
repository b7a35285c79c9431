"""A real job over two machines, which two workers play on this computer: whatever is lost, it ends with one device's weights. The
workers measure the link between them, and jobs are planned with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from optimizer.base.units import GIB, MIB
from tests.breadth import SEVERAL_DEVICES
from tests.end_to_end.devices.test_two_devices import SHORT, GangJobs, parent_of, processes
from tests.end_to_end.site.stack import running_stack
from tests.end_to_end.test_survival import CHECKPOINT_EVERY, PLAN, ROOMY_BYTES
from tests.webapp.conftest import MACHINE_DOCUMENT
from tests.worker.processes import is_alive, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.breadth(SEVERAL_DEVICES)]

CARD = MACHINE_DOCUMENT["device"]["name"]
MACHINES = ("home", "office")
NUM_STEPS = 60
PLAN_OVER_TWO: dict[str, Any] = {
    **PLAN,
    "batch": {"micro_batch_size": 2, "accumulation_steps": 1},
    "layout": {
        "num_devices": 2,
        "data": "zero1",
        "ranks": [{"device": f"{CARD}@{machine}"} for machine in MACHINES],
    },
}
PLANNED: dict[str, Any] = {
    "workload": {**SHORT, "num_steps": 6},
    "goal": {"device_budget_bytes": GIB, "pins": {"layout": {"num_devices": 2}}},
    "machines": list(MACHINES),
}
"""Submitted without a plan."""
PLAN_ON_ONE: dict[str, Any] = {**PLAN, "batch": {"micro_batch_size": 2, "accumulation_steps": 2}}


class JoinedJobs(GangJobs):
    """Jobs over two machines, each with a worker of its name."""

    def start_joined(self) -> str:
        return self._create(plan=PLAN_OVER_TWO, machines=MACHINES)

    def start_on_one(self) -> str:
        return self._create(plan=PLAN_ON_ONE)

    def start_worker_of(self, machine: str) -> None:
        self.stack.start_worker(machine, HEADROOM_WORKER_NAME=machine)

    def members(self, job: str) -> list[dict[str, Any]]:
        return self.stack.ask("members", job=job)

    def runners_of(self, worker: str) -> list[int]:
        """Processes of attempts that were started by this worker, their leaders first."""
        leaders = [pid for pid in processes() if is_alive(pid) and parent_of(pid) == self.stack.pid(worker)]
        return [*leaders, *(pid for pid in processes() if is_alive(pid) and parent_of(pid) in leaders)]

    def last_step(self, job: str) -> int:
        """The step of the newest of the job's checkpoints."""
        return max(int(path.name.split("-")[1]) for path in (self.stack.home / "jobs" / job / "checkpoints").glob("step-*"))

    def wait_until_at_work(self, job: str, *, step: int) -> dict[str, list[int]]:
        """Until the job has a checkpoint of this step; its processes on each machine."""
        self.wait_until_trained(job, step=step)
        return {machine: self.runners_of(machine) for machine in MACHINES}

    def link(self) -> dict[str, Any]:
        """The link between the machines, once it was measured since it was last asked for."""

        def measured() -> dict[str, Any] | None:
            (link,) = self.stack.ask("links") or [{"is_due": True}]
            return None if link["is_due"] else link

        return wait_for(measured, what="the link between the machines", timeout_s=90)

    def _create(self, **arguments: Any) -> str:
        return self.stack.ask(
            "create_job",
            model=self.model,
            dataset=self.dataset,
            workload={**SHORT, "num_steps": NUM_STEPS},
            budget_bytes=ROOMY_BYTES,
            kind="train",
            **arguments,
        )


@contextmanager
def two_machines(document: dict[str, Any]) -> Iterator[JoinedJobs]:
    """A stack with a worker of each machine, both of which are as the document says."""
    with running_stack(machine=document, has_worker=False) as stack:
        found = JoinedJobs(stack)
        for machine in MACHINES:
            found.start_worker_of(machine)
        wait_for(lambda: stack.ask("num_machines") == len(MACHINES), what="both machines", timeout_s=60)
        yield found
        print(stack.logs())


@pytest.fixture(scope="module")
def jobs() -> Iterator[JoinedJobs]:
    with two_machines(MACHINE_DOCUMENT) as found:
        yield found


def test_workers_measure_their_link_at_their_start_and_a_job_runs_over_it_unstated(jobs: JoinedJobs) -> None:
    link = jobs.link()
    assert link["failure"] == ""
    assert {link["of"], link["machine"]} == set(MACHINES)
    assert 0 < link["round_trip_s"] < 0.1
    sizes = [size for size, _ in link["bytes_per_s_by_size"]]
    assert sizes == [64 * 1024, MIB, 16 * MIB]
    assert all(rate > 1e7 for _, rate in link["bytes_per_s_by_size"])
    profile = jobs.stack.ask("request_profile", model=jobs.model)
    assert jobs.wait_for_end(profile)["state"] == "succeeded", jobs.log(profile)
    job = jobs.stack.ask("submit_planned", model=jobs.model, dataset=jobs.dataset, **PLANNED)
    row = jobs.wait_for_end(job)
    assert row["state"] == "succeeded", f"{row}\n{jobs.log(job)}"
    spec = jobs.stack.ask("plan_of", job=job)["spec"]
    assert (spec["link"], spec["link_measured_at"]) == (link["link"], link["measured_at"])
    assert [part["machine_name"] for part in jobs.members(job)]


def test_a_job_keeps_its_link_from_being_measured_again_and_loses_no_step_to_a_worker_that_is_asked_to_stop(
    jobs: JoinedJobs,
) -> None:
    before = jobs.link()
    job = jobs.start_joined()
    jobs.wait_until_at_work(job, step=CHECKPOINT_EVERY)
    assert jobs.stack.ask("ask_for_links", machine="home") == 1
    jobs.wait_until_at_work(job, step=2 * CHECKPOINT_EVERY)
    (link,) = jobs.stack.ask("links")
    assert (link["is_due"], link["measured_at"]) == (True, before["measured_at"])
    assert jobs.stack.terminate("office") == 0
    row = jobs.show(job)
    assert (row["state"], row["message"]) == ("queued", "the worker of office was asked to stop")
    (attempt,) = jobs.attempts(job)
    assert attempt["outcome"] == "drained"
    assert jobs.last_step(job) == jobs.steps(job)[-1]
    jobs.stack.ask("cancel", job=job, mode="discard")
    jobs.start_worker_of("office")
    assert jobs.link()["measured_at"] > before["measured_at"]


def test_two_machines_train_as_one_device_does_whatever_becomes_of_the_second(jobs: JoinedJobs) -> None:
    job = jobs.start_joined()
    found = jobs.wait_until_at_work(job, step=CHECKPOINT_EVERY)
    assert [len(found[machine]) for machine in MACHINES] == [2, 2]
    jobs.stack.kill("office")
    wait_for(lambda: not any(map(is_alive, found["office"])), what="the end of its part", timeout_s=10)
    jobs.wait_for_event(job, "requeued")
    assert jobs.show(job)["message"] == "office was lost"
    wait_for(lambda: not any(map(is_alive, found["home"])), what="the end of the other part", timeout_s=10)

    # what waits for a machine that is not there keeps no device from others
    alone = jobs.start_on_one()
    wait_for(lambda: jobs.attempts(alone), what="the job of one device to begin")
    jobs.start_worker_of("office")
    again = jobs.wait_until_at_work(job, step=jobs.last_step(job) + CHECKPOINT_EVERY)
    jobs.stack.halt("office")
    try:
        jobs.wait_for_event(job, "requeued", count=2)
        wait_for(lambda: not any(map(is_alive, again["office"])), what="the end of the frozen part", timeout_s=10)
    finally:
        jobs.stack.wake("office")

    row = jobs.wait_for_end(job)
    assert row["state"] == "succeeded", f"{row}\n{jobs.log(job)}"
    assert row["summary"]["weights_sha256"] == jobs.show(alone)["summary"]["weights_sha256"]
    assert jobs.steps(job) == list(range(1, NUM_STEPS + 1))
    assert [attempt["outcome"] for attempt in jobs.attempts(job)] == ["worker_lost", "worker_lost", "succeeded"]
    assert [(part["machine_name"], part["is_lost"]) for part in jobs.members(job)] == [
        ("office", True), ("office", True), ("office", False)
    ]  # fmt: skip
    assert row["failed_attempts"] == 0
    wait_for(lambda: not any(map(jobs.runners_of, MACHINES)), what="the end of all processes", timeout_s=10)


def test_a_job_goes_on_without_a_machine_that_stays_away(jobs: JoinedJobs) -> None:
    jobs.stack.kill("reconciler")
    jobs.stack.start_reconciler(HEADROOM_AWAY_S="8")
    job = jobs.start_joined()
    jobs.wait_until_at_work(job, step=CHECKPOINT_EVERY)
    jobs.stack.kill("office")
    try:
        row = jobs.wait_for_end(job)
    finally:
        jobs.start_worker_of("office")
        jobs.stack.kill("reconciler")
        jobs.stack.start_reconciler()
    assert row["state"] == "succeeded", f"{row}\n{jobs.log(job)}"
    (said,) = [event["message"] for event in jobs.stack.ask("events", job=job) if event["kind"] == "replanned"]
    assert said.startswith("office has been away for 8 s; the job goes on with home: ")
    assert jobs.steps(job) == list(range(1, NUM_STEPS + 1))
    assert [part["machine_name"] for part in jobs.members(job)] == ["office"]
    first, last = jobs.attempts(job)
    assert (first["outcome"], last["outcome"]) == ("worker_lost", "succeeded")
    assert last["resumed_from_step"] >= CHECKPOINT_EVERY
