"""A backup that is made while a job trains starts a service elsewhere, in which the job goes on; so does one of each release."""

import json
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.breadth import WHOLE_ROADS
from tests.end_to_end.site.stack import Stack, running_stack
from tests.end_to_end.test_survival import NUM_STEPS, TrainJobs
from worker.stack.backup.make import make_backup
from worker.stack.backup.restore import restore_backup

pytestmark = [pytest.mark.slow, pytest.mark.breadth(WHOLE_ROADS)]
RELEASES = sorted(Path(__file__).with_name("releases").glob("*.tar.xz"))


class RestoredJobs(TrainJobs):
    """Questions to a service that has its models and data already."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack


@contextmanager
def restored(backup: Path) -> Iterator[RestoredJobs]:
    """A service at work on a folder of its own that a backup was put into."""
    stack = Stack()
    try:
        shutil.rmtree(stack.home)
        restore_backup(backup, stack.home)
        for name in ("run", "valkey"):
            (stack.home / name).mkdir()
        stack.prepare()
        stack.start_valkey()
        stack.start_reconciler()
        stack.start_worker()
        yield RestoredJobs(stack)
    finally:
        stack.close()


def assert_went_on(jobs: TrainJobs, job: str) -> None:
    """To the end, from a checkpoint, with each step once."""
    assert jobs.wait_for_end(job)["state"] == "succeeded", jobs.log(job)
    assert jobs.steps(job) == list(range(1, NUM_STEPS + 1))
    samples = jobs.stack.ask("samples", job=job, kind="step")
    assert min(row["step"] for row in samples if row["attempt"] == 2) > 10


@pytest.fixture(autouse=True)
def _sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)


def test_a_job_that_trained_during_a_backup_goes_on_where_it_is_restored(tmp_path: Path) -> None:
    """To the weights that it comes to where it was, which the backup does not disturb."""
    with running_stack() as stack:
        jobs = TrainJobs(stack)
        job = jobs.start()
        jobs.wait_until_trained(job, step=10)
        make_backup(stack.home, tmp_path / "backup")
        assert jobs.show(job)["state"] == "running"
        undisturbed = jobs.wait_for_end(job)
        assert undisturbed["attempt"] == 1
    with restored(tmp_path / "backup") as elsewhere:
        assert_went_on(elsewhere, job)
        assert elsewhere.show(job)["summary"]["weights_sha256"] == undisturbed["summary"]["weights_sha256"]


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def test_what_an_earlier_release_left_is_taken_up(tmp_path: Path, release: Path) -> None:
    """Its database, a model, a dataset, a plan and a checkpoint, of a job that was at work when the backup was made."""
    with tarfile.open(release) as packed:
        packed.extractall(tmp_path, filter="data")
    expected = json.loads((tmp_path / "expected.json").read_text())
    with restored(tmp_path / "backup") as jobs:
        ended, job = expected["ended"], expected["running"]
        assert jobs.show(ended["id"])["summary"]["weights_sha256"] == ended["weights_sha256"]
        assert jobs.steps(ended["id"]) == list(range(1, NUM_STEPS + 1))
        assert_went_on(jobs, job)
        # another processor rounds in another way
        assert jobs.show(job)["summary"]["validation_loss"] == pytest.approx(ended["validation_loss"], rel=1e-3)
