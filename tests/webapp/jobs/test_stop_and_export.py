"""A stop leaves weights that can be used, a checkpoint alone, or nothing."""

from collections.abc import Callable

import pytest
from django.conf import settings

from tests.webapp.jobs.attempts import DRAINED, run
from webapp.attempts.outcome import finish_attempt
from webapp.catalog.models import Machine
from webapp.jobs.actions import CancelMode, cancel_job, record_checkpoint
from webapp.jobs.checkpoints import SOURCE_FOLDER, exports_of
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db
CHECKPOINT = "step-000005-f1"


@pytest.mark.parametrize(("mode", "num_exports"), [("save", 1), ("keep", 0), ("discard", 0)])
def test_a_stopped_run_exports_its_last_checkpoint_if_that_was_asked_for(
    make_job: Callable[..., Job], machine: Machine, mode: CancelMode, num_exports: int
) -> None:
    """Stop and save left a checkpoint that nothing could use."""
    job = make_job()
    folder = settings.HEADROOM_HOME / "jobs" / job.pk / "checkpoints" / CHECKPOINT
    folder.mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(b"w")
    attempt = run(machine)
    assert record_checkpoint(
        attempt, step=5, folder=f"checkpoints/{CHECKPOINT}", manifest_sha256="0", num_bytes=1
    )
    cancel_job(job, mode=mode, actor="user:ada")
    assert finish_attempt(attempt, result=DRAINED, exit_code=75) == "cancelled"
    exports = exports_of(job)
    assert [(each.state, each.spec["step"]) for each in exports] == [("queued", 5)] * num_exports
    for each in exports:
        kept = settings.HEADROOM_HOME / "jobs" / each.pk / SOURCE_FOLDER / CHECKPOINT / "weights.safetensors"
        assert kept.read_bytes() == b"w"
