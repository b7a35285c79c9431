"""Each promise that a campaign holds the service to: a sound end passes, and whatever breaks the promise is found."""

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from pytest_django import Settings

from tests.chaos import checker
from tests.chaos.quick import work
from tests.webapp.conftest import make_bench, make_person, make_spec, make_text, make_tiny_model
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_checkpoint, record_samples, record_started
from webapp.jobs.actions import create_job
from webapp.jobs.models import Artifact, Attempt, Checkpoint, Event, IdempotencyKey, Job, Sample, State

NAME = "quick-0-0"
WEIGHTS = work.weights_after(work.NUM_STEPS)
Accepted = dict[str, dict[str, Any]]


@pytest.fixture
def accepted(transactional_db: None, tmp_path: Path, settings: Settings) -> Accepted:
    """One job that was drained once and then succeeded, as a quick job of a campaign does."""
    settings.HEADROOM_HOME, settings.REDIS_URL = tmp_path, f"unix://{tmp_path}/none.sock"
    owner, machine, model, dataset = make_person("ada"), make_bench(), make_tiny_model(), make_text()
    job = create_job(
        owner=owner, spec=make_spec(model, dataset, name=NAME), model=model, dataset=dataset,
        plan=None, prediction=None, machine=machine, actor="user:ada",
    )  # fmt: skip
    half = work.NUM_STEPS // 2
    drained = {"outcome": "drained", "reason": "", "message": "asked", "error": None, "step": half}
    do_attempt(machine, steps=range(1, half + 1), result=drained, exit_code=75)
    file = tmp_path / "jobs" / job.pk / "artifacts" / "model" / "state.txt"
    file.parent.mkdir(parents=True)
    file.write_text("the end")
    kept = {"kind": "model", "name": file.name, "file": "artifacts/model/state.txt", "num_bytes": 7}
    done = {
        "outcome": "succeeded",
        "reason": "done",
        "message": "done",
        "error": None,
        "step": work.NUM_STEPS,
        "summary": {"weights_sha256": WEIGHTS},
        "artifacts": [{**kept, "sha256": hashlib.sha256(b"the end").hexdigest()}],
    }
    do_attempt(machine, steps=range(half + 1, work.NUM_STEPS + 1), result=done, exit_code=0)
    return {NAME: {"id": job.pk, "may_be_cancelled": False, "is_to_be_resumed": False}}


def do_attempt(machine: Any, *, steps: range, result: dict[str, Any], exit_code: int) -> None:
    attempt = claim_job(worker="w", machine=machine)
    assert attempt is not None
    record_started(attempt, pid=1)
    now_s = timezone.now().timestamp()
    records = [{"kind": "step", "attempt": attempt.number, "step": step, "time_s": now_s, "loss": 1.0} for step in steps]
    assert record_samples(attempt, records)
    write_samples(attempt, records)
    folder = f"checkpoints/step-{steps[-1]:06d}-f{attempt.fence}"
    assert record_checkpoint(attempt, step=steps[-1], folder=folder, manifest_sha256="c0" * 32, num_bytes=1)
    assert finish_attempt(attempt, result=result, exit_code=exit_code)


def write_samples(attempt: Attempt, records: list[dict[str, Any]]) -> None:
    from django.conf import settings

    file = settings.HEADROOM_HOME / "jobs" / attempt.job_id / "attempts" / str(attempt.number) / "samples.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)


def test_a_sound_end_keeps_every_promise(accepted: Accepted) -> None:
    answer = checker.check_all(accepted)
    assert answer["broken"] == {}
    assert answer["facts"] == {"ends": {"succeeded": 1}, "given_up": 0, "num_attempts": 2}


def test_a_lost_job_is_found(accepted: Accepted) -> None:
    accepted["quick-0-1"] = {"id": "job_gone", "may_be_cancelled": False}
    assert broken(accepted) == {"none is lost, doubled or stuck": "quick-0-1 was accepted and is there 0 times"}


def lose_end() -> None:
    Event.objects.filter(to_state=State.SUCCEEDED).delete()


def add_end() -> None:
    event = Event.objects.filter(to_state=State.SUCCEEDED).get()
    Event.objects.create(job=event.job, seq=event.seq + 1, kind="state", from_state="running", to_state="succeeded", actor="x")


def restate(**changes: Any) -> Callable[[], None]:
    """Write past the program's actions; the triggers that keep an ended job ended are off for it."""

    def change() -> None:
        from django.db import connection

        with connection.cursor() as cursor:
            for (name,) in cursor.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
                cursor.execute(f"DROP TRIGGER {name}")
        Job.objects.update(**changes)

    return change


def write_late() -> None:
    attempt = Attempt.objects.get(number=1)
    late_s = (timezone.now() + timedelta(seconds=5)).timestamp()
    write_samples(attempt, [{"kind": "step", "attempt": 1, "step": 11, "time_s": late_s}])


def save_late() -> None:
    first = Checkpoint.objects.order_by("step").first()
    assert first is not None
    Checkpoint.objects.filter(pk=first.pk).update(created_at=timezone.now() + timedelta(seconds=5))


def damage_artifact() -> None:
    from django.conf import settings

    (settings.HEADROOM_HOME / Artifact.objects.get().file).write_text("another end")


def leave_half() -> None:
    from django.conf import settings

    (settings.HEADROOM_HOME / "jobs" / Job.objects.get().pk / "checkpoints" / ".tmp-step-000004-f1").mkdir(parents=True)


def leave_unnamed() -> None:
    from django.conf import settings

    (settings.HEADROOM_HOME / "jobs" / Job.objects.get().pk / "artifacts" / "f1" / "model").mkdir(parents=True)


def hold_key() -> None:
    IdempotencyKey.objects.create(user=Job.objects.get().owner, key="k", request_sha256="0" * 64)


def reorder_attempts() -> None:
    first, second = Attempt.objects.order_by("number")
    Attempt.objects.filter(pk=second.pk).update(started_at=first.started_at - timedelta(seconds=1))


@pytest.mark.parametrize(
    ("harm", "promise", "words"),
    [
        (restate(state=State.QUEUED, finished_at=None), "none is lost, doubled or stuck", "has not ended: queued"),
        (restate(state=State.CANCELLED), "none is lost, doubled or stuck", "is cancelled, and nobody asked for it"),
        (restate(state=State.FAILED, reason="internal"), "none is lost, doubled or stuck", "failed: internal"),
        (lose_end, "one end, and moves that follow each other", "has 0 ends"),
        (add_end, "one end, and moves that follow each other", "has 2 ends"),
        (lambda: Attempt.objects.filter(number=1).update(ended_at=None), "attempts follow each other", "has no outcome"),
        (lambda: Attempt.objects.filter(number=2).update(fence=0), "attempts follow each other", "with fence 0 after"),
        (reorder_attempts, "attempts follow each other", "before"),
        (write_late, "no stale attempt writes", "after attempt 2 had begun"),
        (save_late, "no stale attempt writes", "after the next attempt had begun"),
        (lambda: Sample.objects.filter(step=3).delete(), "samples are whole", "19 of 20 steps"),
        (restate(summary={"weights_sha256": "0" * 64}), "the same weights however disturbed", "other weights"),
        (damage_artifact, "artifacts are what their sums say", "is not what its sum says"),
        (lambda: Artifact.objects.all().delete(), "artifacts are what their sums say", "succeeded and left nothing"),
        (leave_half, "nothing half-made is left", ".tmp-step-000004-f1 is left"),
        (leave_unnamed, "nothing half-made is left", "artifacts/f1 is left"),
        (hold_key, "nothing half-made is left", "1 idempotency keys are held"),
    ],
)
def test_a_broken_promise_is_found(accepted: Accepted, harm: Callable[[], object], promise: str, words: str) -> None:
    harm()
    assert words in broken(accepted).get(promise, "nothing was found")


def test_a_cancelled_job_is_right_when_somebody_asked_for_it(accepted: Accepted) -> None:
    restate(state=State.CANCELLED)()
    accepted[NAME]["may_be_cancelled"] = True
    assert broken(accepted) == {}


def broken(accepted: Accepted) -> dict[str, str]:
    return {promise: " ".join(found) for promise, found in checker.check_all(accepted)["broken"].items()}
