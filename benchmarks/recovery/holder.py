"""A worker that only holds jobs: claims them by the service's own code and renews their leases until it is killed.

``python -m benchmarks.recovery.holder COUNT SEED``; prints the ids of its jobs as one line of JSON when it holds them all. Claims
are spread over one heartbeat, so that a kill meets leases of every age. One connection to the database renews them all, each at
its own time: hundreds of jobs would need more than PostgreSQL has.
"""

import heapq
import json
import os
import random
import sys
import time
from typing import Any

import django


def main() -> None:
    count, seed = (int(each) for each in sys.argv[1:])
    django.setup()
    from webapp.attempts.claiming import claim_job
    from webapp.attempts.records import renew_lease
    from webapp.catalog.models import Machine, Model
    from webapp.jobs.actions import create_job
    from worker.config import WorkerConfig
    from worker.heartbeat import Heartbeat
    from worker.run.watch.lifeline import boot_s

    config = WorkerConfig.from_environment()
    machine, model, pauses = Machine.objects.get(), Model.objects.get(), random.Random(seed)
    due: list[tuple[float, str, Heartbeat]] = []
    """When each lease is renewed next, by the monotonic clock; a heap."""
    for number in range(count):
        time.sleep(pauses.uniform(0, 2 * config.heartbeat_s / count))
        none: dict[str, Any] = dict.fromkeys(("dataset", "plan", "prediction", "machine"))
        spec = {"name": f"held {number}"}
        job = create_job(owner=None, spec=spec, model=model, kind="profile", actor="program", **none)
        asked_s = boot_s()
        attempt = claim_job(worker=f"holder:{os.getpid()}", machine=machine, job_id=job.pk, lease_s=config.lease_s)
        assert attempt is not None, f"job {job.pk} could not be claimed"
        heartbeat = Heartbeat(
            _renewing(renew_lease, attempt, config.lease_s),
            asked_s=asked_s,
            lease_s=config.lease_s,
            interval_s=config.heartbeat_s,
            outage_s=config.outage_s,
        )
        heapq.heappush(due, (time.monotonic() + config.heartbeat_s, job.pk, heartbeat))
    print(json.dumps([job_id for _, job_id, _ in due]), flush=True)
    while True:
        due_s, job_id, heartbeat = due[0]
        time.sleep(max(0.0, due_s - time.monotonic()))
        heartbeat.beat()
        heapq.heapreplace(due, (due_s + config.heartbeat_s, job_id, heartbeat))


def _renewing(renew_lease: Any, attempt: Any, lease_s: int) -> Any:
    return lambda: renew_lease(attempt, lease_s=lease_s)


if __name__ == "__main__":
    main()
