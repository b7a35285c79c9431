"""Two real workers on this computer measure the link between them, and a job over both is planned and run with it."""

from typing import Any

import pytest

from optimizer.base.units import GIB, MIB
from tests.end_to_end.devices.test_two_machines import MACHINES, SHORT, JoinedJobs
from tests.end_to_end.devices.test_two_machines import jobs as jobs
from tests.worker.processes import wait_for

pytestmark = pytest.mark.slow

ASKED: dict[str, Any] = {
    "workload": {**SHORT, "num_steps": 6},
    "goal": {"device_budget_bytes": GIB, "pins": {"layout": {"num_devices": 2}}},
    "machines": list(MACHINES),
}


def link_of(jobs: JoinedJobs) -> dict[str, Any]:
    """Once it was measured since it was last asked for."""

    def measured() -> dict[str, Any] | None:
        (link,) = jobs.stack.ask("links") or [{"is_due": True}]
        return None if link["is_due"] else link

    return wait_for(measured, what="the link between the machines", timeout_s=90)


def test_workers_measure_their_link_at_their_start_and_a_job_runs_over_it_unstated(jobs: JoinedJobs) -> None:
    link = link_of(jobs)
    assert link["failure"] == ""
    assert {link["of"], link["machine"]} == set(MACHINES)
    assert 0 < link["round_trip_s"] < 0.1
    sizes = [size for size, _ in link["bytes_per_s_by_size"]]
    assert sizes == [64 * 1024, MIB, 16 * MIB]
    assert all(rate > 1e7 for _, rate in link["bytes_per_s_by_size"])
    profile = jobs.stack.ask("request_profile", model=jobs.model)
    assert jobs.wait_for_end(profile)["state"] == "succeeded", jobs.log(profile)
    job = jobs.stack.ask("submit_planned", model=jobs.model, dataset=jobs.dataset, **ASKED)
    row = jobs.wait_for_end(job)
    assert row["state"] == "succeeded", f"{row}\n{jobs.log(job)}"
    spec = jobs.stack.ask("plan_of", job=job)["spec"]
    assert (spec["link"], spec["link_measured_at"]) == (link["link"], link["measured_at"])
    assert [part["machine_name"] for part in jobs.members(job)]


def test_a_link_is_measured_again_when_asked_for_but_not_while_a_job_runs(jobs: JoinedJobs) -> None:
    before = link_of(jobs)
    job = jobs.start_joined()
    jobs.wait_until_at_work(job, step=5)
    assert jobs.stack.ask("ask_for_links", machine="home") == 1
    jobs.wait_until_at_work(job, step=10)
    (link,) = jobs.stack.ask("links")
    assert (link["is_due"], link["measured_at"]) == (True, before["measured_at"])
    jobs.stack.ask("cancel", job=job, mode="discard")
    jobs.wait_for_end(job)
    assert link_of(jobs)["measured_at"] > before["measured_at"]
