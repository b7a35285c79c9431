"""A running job to watch."""

import pytest
from django.db import connections

from tests.webapp.conftest import make_bench, make_person, make_spec, make_text, make_tiny_model
from webapp.attempts.claiming import claim_job
from webapp.attempts.records import record_samples, record_started
from webapp.jobs.actions import create_job
from webapp.jobs.models import Attempt


@pytest.fixture
def running(transactional_db: None) -> Attempt:
    """A running job of ada's and its attempt."""
    owner, model, dataset, machine = make_person("ada"), make_tiny_model(), make_text(), make_bench()
    create_job(
        owner=owner, spec=make_spec(model, dataset), model=model, dataset=dataset,
        plan=None, prediction=None, machine=machine, actor="user:ada",
    )  # fmt: skip
    attempt = claim_job(worker="w", machine=machine)
    record_started(attempt, pid=1)
    record_samples(
        attempt, [{"kind": "step", "attempt": 1, "step": 1, "time_s": 0.0, "loss": 1.0, "device_peak_bytes": 10}]
    )
    connections.close_all()  # while one is open, SQLite keeps the files of those that were closed
    return attempt
