"""A real job on two devices that the CPU plays: whatever is killed, it ends with the weights of an undisturbed run."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.breadth import SEVERAL_DEVICES
from tests.end_to_end.site.stack import running_stack
from tests.end_to_end.test_survival import CHECKPOINT_EVERY, PLAN, ROOMY_BYTES, TIGHT_BYTES, WORKLOAD, TrainJobs
from tests.webapp.conftest import MACHINE_DOCUMENT
from tests.worker.processes import is_alive, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.breadth(SEVERAL_DEVICES)]

LINK = {"kind": "loopback", "bytes_per_s": 1e9, "latency_s": 1e-4, "source": "table"}
TWO_DEVICES = {**MACHINE_DOCUMENT, "num_devices": 2, "peers": LINK}
NUM_STEPS = 20
SHORT = {**WORKLOAD, "num_steps": NUM_STEPS, "sample_tokens": 0}
PLAN_ON_TWO: dict[str, Any] = {
    **PLAN,
    "batch": {"micro_batch_size": 2, "accumulation_steps": 1},
    "layout": {"num_devices": 2, "data": "zero1"},
}


class GangJobs(TrainJobs):
    """Jobs of two devices, and their processes."""

    def start_on_two(self, *, budget_bytes: int = ROOMY_BYTES, plan: dict[str, Any] = PLAN_ON_TWO) -> str:
        return self.stack.ask(
            "create_job",
            model=self.model,
            dataset=self.dataset,
            workload=SHORT,
            plan=plan,
            budget_bytes=budget_bytes,
            kind="train",
        )

    def ranks(self, job: str, leader: int) -> list[int]:
        """Processes of the newest attempt's ranks, in their order."""

        def children() -> list[tuple[int, int]]:
            found = [(rank_of(pid), pid) for pid in processes() if is_alive(pid) and parent_of(pid) == leader]
            return sorted(found) if len(found) == 2 else []

        return [pid for _, pid in wait_for(children, what=f"the ranks of {job}")]


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def rank_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").rsplit("\0", 1)[1])


@pytest.fixture(scope="module")
def jobs() -> Iterator[GangJobs]:
    with running_stack(machine=TWO_DEVICES, HEADROOM_DEVICES="2") as stack:
        yield GangJobs(stack)
        print(stack.logs())


@pytest.fixture(scope="module")
def undisturbed(jobs: GangJobs) -> dict[str, Any]:
    """The end of a run that nobody disturbed."""
    job = jobs.start_on_two()
    row = jobs.wait_for_end(job)
    assert row["state"] == "succeeded", f"{row}\n{jobs.log(job)}"
    assert jobs.steps(job) == list(range(1, NUM_STEPS + 1))
    (attempt,) = jobs.attempts(job)
    assert attempt["devices"] == [0, 1]
    assert len(attempt["measured"]["rank_peak_bytes"]) == 2
    assert attempt["measured"]["device_peak_bytes"] == max(attempt["measured"]["rank_peak_bytes"])
    return row


def assert_same_end(jobs: GangJobs, job: str, undisturbed: Any) -> None:
    row = jobs.wait_for_end(job)
    assert row["state"] == "succeeded", f"{row}\n{jobs.log(job)}"
    assert row["summary"]["weights_sha256"] == undisturbed["summary"]["weights_sha256"]
    assert jobs.steps(job) == list(range(1, NUM_STEPS + 1))


def test_a_killed_rank_and_a_pause_cost_nothing_but_time_and_leave_no_process(jobs: GangJobs, undisturbed: Any) -> None:
    job = jobs.start_on_two()
    leader = jobs.wait_until_trained(job, step=CHECKPOINT_EVERY)
    ranks = jobs.ranks(job, leader)
    os.kill(ranks[1], signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, [leader, *ranks])), what="the end of all processes", timeout_s=10)
    wait_for(lambda: len(jobs.attempts(job)) == 2 and jobs.attempts(job)[-1]["pid"], what="a second attempt", timeout_s=60)
    again = jobs.ranks(job, jobs.attempts(job)[-1]["pid"])
    jobs.stack.ask("pause", job=job)
    jobs.wait_for_event(job, "requeued", count=2)
    assert not any(map(is_alive, again))
    jobs.stack.ask("resume", job=job)
    assert_same_end(jobs, job, undisturbed)
    first, second, last = jobs.attempts(job)
    assert [attempt["outcome"] for attempt in (first, second, last)] == ["worker_lost", "paused", "succeeded"]
    assert first["exit_code"] == -signal.SIGKILL
    assert last["resumed_from_step"] >= second["resumed_from_step"] >= CHECKPOINT_EVERY


def test_a_rank_without_room_fails_the_job_by_name(jobs: GangJobs) -> None:
    job = jobs.start_on_two(budget_bytes=TIGHT_BYTES)
    row = jobs.wait_for_end(job)
    assert (row["state"], row["reason"]) == ("failed", "out_of_device_memory")
    assert row["error"]["fields"]["num_ranks"] == 2
    assert row["error"]["message"].startswith(f"rank {row['error']['fields']['rank']} of 2, on cpu: ")


def test_a_job_whose_devices_share_each_block_trains_as_one_does(jobs: GangJobs, undisturbed: Any) -> None:
    batch = {"micro_batch_size": 2, "accumulation_steps": 2}
    job = jobs.start_on_two(plan={**PLAN_ON_TWO, "batch": batch, "layout": {"num_devices": 2, "tensor": 2}})
    row = jobs.wait_for_end(job)
    assert row["state"] == "succeeded", f"{row}\n{jobs.log(job)}"
    for key in ("loss", "validation_loss"):
        assert row["summary"][key] == pytest.approx(undisturbed["summary"][key], rel=1e-4), key
    (attempt,) = jobs.attempts(job)
    first, second = attempt["measured"]["rank_peak_bytes"]
    assert first == second
