"""Jobs that were just made or claimed, for tests of what a supervisor and the reconciler do with them."""

from tests.webapp.conftest import make_bench, make_text, make_tiny_model
from webapp.attempts.claiming import claim_job
from webapp.jobs import actions
from webapp.jobs.models import Attempt


def claim_new_job() -> Attempt:
    """The first attempt of a job of ten steps, with a lease of a minute."""
    machine = make_bench()
    make_jobs(1)
    return claim_job(worker="w:1", machine=machine, lease_s=60)


def make_jobs(count: int) -> None:
    """Queued jobs of ten steps, which any machine may take."""
    model, dataset = make_tiny_model(), make_text()
    for _ in range(count):
        actions.create_job(
            owner=None,
            spec={"name": "a", "workload": {"num_steps": 10}},
            model=model,
            dataset=dataset,
            plan=None,
            prediction=None,
            machine=None,
            actor="user:test",
        )
