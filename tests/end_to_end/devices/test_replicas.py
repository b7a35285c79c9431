"""A real job with a replica of its state, gradients and weights in each of two machines, both played on this computer."""

from collections.abc import Iterator

import pytest

from optimizer.base.units import GIB
from tests.breadth import SEVERAL_DEVICES
from tests.end_to_end.devices.test_two_devices import SHORT
from tests.end_to_end.devices.test_two_machines import CARD, MACHINES, JoinedJobs, two_machines
from tests.webapp.conftest import MACHINE_DOCUMENT
from tests.worker.processes import is_alive, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.breadth(SEVERAL_DEVICES)]

WORKLOAD = {**SHORT, "global_batch_size": 4, "num_steps": 30}


@pytest.fixture(scope="module")
def jobs() -> Iterator[JoinedJobs]:
    with two_machines({**MACHINE_DOCUMENT, "num_devices": 2}) as found:
        yield found


def test_a_planned_job_with_a_replica_in_each_machine_outlives_one_of_them(jobs: JoinedJobs) -> None:
    profile = jobs.stack.ask("request_profile", model=jobs.model)
    assert jobs.wait_for_end(profile)["state"] == "succeeded", jobs.log(profile)

    def submit(**layout: object) -> str:
        goal = {"device_budget_bytes": GIB, "pins": {"layout": layout}}
        return jobs.stack.ask(
            "submit_planned",
            model=jobs.model,
            dataset=jobs.dataset,
            workload=WORKLOAD,
            goal=goal,
            **({"machines": list(MACHINES), "link": "10Gbit,0.1ms"} if layout["num_devices"] == 4 else {}),
        )

    job = submit(num_devices=4, data="zero3", replicas=2)
    plan = jobs.stack.ask("plan_of", job=job)["plan"]
    assert (plan["layout"]["data"], plan["layout"]["replicas"]) == ("zero3", 2)
    names = [rank["device"] for rank in plan["layout"]["ranks"]]
    assert sorted(names[:2]) == names[:2] != names[2:]
    assert set(names) == {f"{CARD}@{machine}" for machine in MACHINES}

    found = jobs.wait_until_at_work(job, step=2)
    jobs.stack.kill("office")
    jobs.wait_for_event(job, "requeued")
    wait_for(lambda: not any(map(is_alive, [*found["home"], *found["office"]])), what="the end of all ranks", timeout_s=10)
    jobs.start_worker_of("office")
    row = jobs.wait_for_end(job)
    assert row["state"] == "succeeded", f"{row}\n{jobs.log(job)}"
    assert jobs.steps(job) == list(range(1, WORKLOAD["num_steps"] + 1))

    alone = jobs.wait_for_end(submit(num_devices=1))
    assert alone["state"] == "succeeded"
    assert row["summary"]["validation_loss"] == pytest.approx(alone["summary"]["validation_loss"], abs=1e-4)
