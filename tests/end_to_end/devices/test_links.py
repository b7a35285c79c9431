"""Two real workers on this computer measure the link between them, and a job over both is planned and run with it."""

import re
import subprocess
from contextlib import ExitStack
from typing import Any

import pytest

from benchmarks.parallel.links.namespaces import INTERFACE, LinkProfile, NoNamespaces, joined_namespaces
from optimizer.base.units import GIB, MIB
from optimizer.hardware.peers import read_network
from tests.end_to_end.devices.test_two_machines import MACHINES, SHORT, JoinedJobs
from tests.end_to_end.devices.test_two_machines import jobs as jobs
from tests.end_to_end.site.stack import running_stack
from tests.webapp.conftest import MACHINE_DOCUMENT
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


def test_workers_in_two_networks_find_the_link_between_them_and_no_job_is_taken_once_it_is_cut() -> None:
    network = LinkProfile(name="100 Mbit/s, 1 ms", bytes_per_s=12.5e6, delay_s=1e-3)
    with ExitStack() as stack:
        try:
            spaces = stack.enter_context(joined_namespaces(len(MACHINES), network))
        except NoNamespaces as error:
            pytest.skip(f"network namespaces cannot be made here: {error.message}")
        jobs = JoinedJobs(stack.enter_context(running_stack(machine=MACHINE_DOCUMENT, has_worker=False)))
        for place, machine in enumerate(MACHINES):
            own = {"HEADROOM_WORKER_NAME": machine, "HEADROOM_RANK_INTERFACE": INTERFACE}
            jobs.stack.start_worker(machine, prefix=spaces.prefix(place), **own)
        link = link_of(jobs)
        assert link["failure"] == "", jobs.stack.logs()
        found = read_network(link["link"])
        # what shares this computer's cores with the test makes the link seem slower, never faster
        assert 0.5 * network.bytes_per_s < found.bytes_per_s < 1.05 * network.bytes_per_s
        assert found.latency_s > network.delay_s
        subprocess.run([*spaces.prefix(0), "ip", "link", "set", INTERFACE, "down"], check=True)
        jobs.stack.ask("ask_for_links", machine="home")
        failure = link_of(jobs)["failure"]
        assert re.search(r"cannot reach|cannot be reached", failure)
        assert "HEADROOM_RANK_INTERFACE" in failure
        refused = jobs.stack.ask("refusal_of", model=jobs.model, dataset=jobs.dataset, **ASKED)
        assert failure in refused
