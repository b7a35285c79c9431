"""A job that has just been claimed, for tests of what its supervisor and the reconciler do with it."""

from tests.webapp.conftest import make_bench, make_text, make_tiny_model
from webapp.jobs import actions
from webapp.jobs.claiming import claim_job
from webapp.jobs.models import Attempt


def claim_new_job() -> Attempt:
    """The first attempt of a job of ten steps, with a lease of a minute."""
    machine = make_bench()
    actions.create_job(
        owner=None,
        spec={"name": "a", "workload": {"num_steps": 10}},
        model=make_tiny_model(),
        dataset=make_text(),
        plan=None,
        prediction=None,
        machine=None,
        actor="user:test",
    )
    return claim_job(worker="w:1", machine=machine, lease_s=60)
