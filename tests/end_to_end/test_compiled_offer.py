"""A long job whose search chooses compiled blocks by itself: profiled, traced, planned and run by a real worker."""

from collections.abc import Iterator
from typing import Any

import pytest

from optimizer.base.units import GIB
from optimizer.hardware.machine import COMPILER_FACT
from tests.breadth import WHOLE_ROADS
from tests.end_to_end.site.stack import running_stack
from tests.end_to_end.test_survival import CHECKPOINT_EVERY, WORKLOAD, TrainJobs
from tests.webapp.conftest import MACHINE_DOCUMENT
from tests.worker.processes import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.breadth(WHOLE_ROADS)]

ASKED: dict[str, Any] = {
    "workload": {**WORKLOAD, "num_steps": 200_000, "sample_tokens": 0},
    "goal": {"device_budget_bytes": GIB, "allow_lossy": True, "most_loss": "rounding"},
}


@pytest.fixture(scope="module")
def jobs() -> Iterator[TrainJobs]:
    machine = {**MACHINE_DOCUMENT, "facts": {COMPILER_FACT: "g++"}}
    # the machine's rates are made up, so a probe would find them wrong and plan again
    with running_stack(machine=machine, HEADROOM_PROBE_ENOUGH_LEFT_S="1000000000") as stack:
        yield TrainJobs(stack)
        print(stack.logs())


def test_a_long_job_waits_for_the_trace_and_trains_with_compiled_blocks(jobs: TrainJobs) -> None:
    wait_for(lambda: jobs.stack.ask("num_machines"), what="the machine", timeout_s=60)
    job = jobs.stack.ask("submit_planned", model=jobs.model, dataset=jobs.dataset, when_ready=True, **ASKED)
    found = wait_for(lambda: (row := jobs.stack.ask("plan_of", job=job))["plan"] and row, what=f"a plan of {job}", timeout_s=400)
    assert found["plan"]["kernels"] == {"blocks": "compiled"}
    wait_for(lambda: jobs.steps(job)[-1:] >= [CHECKPOINT_EVERY], what="steps of compiled code", timeout_s=300)
    assert list((jobs.stack.home / "cache" / "compiled").rglob("*.so"))
    jobs.stack.ask("cancel", job=job, mode="keep")
    row = jobs.wait_for_end(job)
    assert row["state"] == "cancelled", f"{row}\n{jobs.log(job)}"
    (attempt,) = jobs.attempts(job)
    assert attempt["measured"]["device_peak_bytes"] == pytest.approx(found["prediction"]["device_peak_bytes"], rel=0.01)
