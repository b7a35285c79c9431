"""The promises of the service, held against its rows and files once everything has come to rest.

Each function answers with sentences, one for each broken promise; none means that it was kept. Import it after
``django.setup()``.
"""

import hashlib
import itertools
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import Count, F, Q

from tests.chaos.promises import CLEANED, ENDED, FENCED, FOLLOWED, KEPT, LOST, SAMPLED, STORED, WEIGHED
from tests.chaos.quick import work
from webapp.jobs.models import TERMINAL_STATES, Artifact, Attempt, Checkpoint, Event, IdempotencyKey, Job, Sample, State

ENDS = {str(state) for state in TERMINAL_STATES}
GIVEN_UP = "worker_lost"
"""The reason of a job that was disturbed as often as its rules allow; counted, not a broken promise."""
_MOST_SHOWN = 5
_NOTICED_WITHIN_S = 0.25


def check_all(accepted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """accepted: what the service said yes to, by the job's name: ``id`` and ``may_be_cancelled``."""
    rows = Job.objects.values("pk", "name", "state", "reason", "attempt", "summary", "message")
    jobs = [job for job in rows.iterator() if job["name"] in accepted]
    checks = {
        LOST: check_jobs(jobs, accepted),
        ENDED: check_events([job["pk"] for job in jobs]),
        FOLLOWED: check_attempts(),
        FENCED: check_fences(),
        SAMPLED: check_samples(jobs),
        WEIGHED: check_weights(jobs),
        KEPT: check_artifacts(jobs),
        CLEANED: check_leftovers(),
        STORED: check_database(),
    }
    counted = Counter(job["state"] for job in jobs)
    given_up = sum(job["state"] == State.FAILED and job["reason"] == GIVEN_UP for job in jobs)
    attempts = sum(job["attempt"] for job in jobs)
    facts = {"ends": dict(counted), "given_up": given_up, "num_attempts": attempts}
    broken = {name: [*found[:_MOST_SHOWN], *_rest(found)] for name, found in checks.items() if found}
    return {"broken": broken, "facts": facts}


def check_jobs(jobs: list[dict[str, Any]], accepted: dict[str, dict[str, Any]]) -> list[str]:
    found, by_name = [], defaultdict(list)
    for job in jobs:
        by_name[job["name"]].append(job)
    for name, known in accepted.items():
        rows = by_name[name]
        if len(rows) != 1:
            found.append(f"{name} was accepted and is there {len(rows)} times")
            continue
        job = rows[0]
        state, reason = job["state"], job["reason"]
        if job["pk"] != known["id"]:
            found.append(f"{name} was accepted as {known['id']} and is {job['pk']}")
        if state not in ENDS:
            found.append(f"{name} has not ended: {state}")
        elif state == State.CANCELLED and not known["may_be_cancelled"]:
            found.append(f"{name} is cancelled, and nobody asked for it")
        elif state == State.FAILED and reason != GIVEN_UP:
            found.append(f"{name} failed: {reason}: {job['message']}")
    return found


def check_events(pks: list[str]) -> list[str]:
    found = []
    moves: dict[str, list[tuple[str, str]]] = defaultdict(list)
    rows = Event.objects.exclude(to_state="").order_by("job_id", "seq").values_list("job_id", "from_state", "to_state")
    for job, from_state, to_state in rows.iterator():
        moves[job].append((from_state, to_state))
    for job in pks:
        steps = [move for move in moves[job] if move[0] != move[1]]
        num_ends = sum(to in ENDS for _, to in steps)
        if num_ends != 1:
            found.append(f"{job} has {num_ends} ends")
        if any(before[1] != after[0] for before, after in itertools.pairwise(steps)):
            found.append(f"{job} moved {steps}")
    return found


def check_attempts() -> list[str]:
    """Each has ended, before the next of its job began, under a smaller fence."""
    found = [f"{attempt} has no outcome" for attempt in Attempt.objects.filter(Q(outcome="") | Q(ended_at=None))[:20]]
    before = None
    for attempt in Attempt.objects.order_by("job_id", "number").iterator():
        if before is not None and before.job_id == attempt.job_id:
            if attempt.number != before.number + 1 or attempt.fence <= before.fence:
                found.append(f"{attempt} follows {before} with fence {attempt.fence} after {before.fence}")
            if before.ended_at is not None and attempt.started_at < before.ended_at:
                found.append(f"{attempt} began before {before} had ended")
        elif attempt.number != 1:
            found.append(f"the first attempt of {attempt.job_id} is {attempt.number}")
        before = attempt
    return found


def check_fences() -> list[str]:
    """Nothing was measured or saved by an attempt after another of its job had begun. A process that was halted needs a moment to
    notice, in which it may do a step in its own folder; that goes no further.
    """
    began = {(job, number): at.timestamp() for job, number, at in Attempt.objects.values_list("job_id", "number", "started_at")}
    numbers = {(job, fence): number for job, fence, number in Attempt.objects.values_list("job_id", "fence", "number")}
    found = []
    retried = Attempt.objects.filter(number__gt=1).values_list("job_id", flat=True).distinct()
    for job, number, step, at in _measured(set(retried)):
        next_began = began.get((job, number + 1))
        if next_began is not None and at > next_began + _NOTICED_WITHIN_S:
            found.append(f"{job}: attempt {number} did step {step} {at - next_began:.2f} s after attempt {number + 1} had begun")
    for checkpoint in Checkpoint.objects.all().iterator():
        begun = began.get((checkpoint.job_id, numbers.get((checkpoint.job_id, checkpoint.fence), 0) + 1))
        if begun is not None and checkpoint.created_at.timestamp() > begun:
            found.append(f"{checkpoint} was recorded by fence {checkpoint.fence} after the next attempt had begun")
    return found


def check_samples(jobs: list[dict[str, Any]]) -> list[str]:
    """Each step of a job that succeeded once or more, and none that it did not do."""
    counted = Sample.objects.filter(kind="step").values("job_id").annotate(num=Count("step", distinct=True))
    known = dict(counted.values_list("job_id", "num"))
    ended = [job for job in jobs if job["state"] == State.SUCCEEDED]
    wrong = [(job["name"], known.get(job["pk"], 0)) for job in ended if known.get(job["pk"], 0) != work.NUM_STEPS]
    return [f"{name} has {num} of {work.NUM_STEPS} steps" for name, num in wrong]


def check_weights(jobs: list[dict[str, Any]]) -> list[str]:
    right, real, found = work.weights_after(work.NUM_STEPS), defaultdict(list), []
    plans = dict(Attempt.objects.values_list("job_id", "plan").filter(number=F("job__attempt")))
    for job in jobs:
        if job["state"] != State.SUCCEEDED:
            continue
        sha256 = job["summary"].get("weights_sha256")
        if work.kind_of(job["name"]) not in work.STEP_S:
            real[json.dumps(plans[job["pk"]], sort_keys=True)].append((sha256, job["name"]))
        elif sha256 != right:
            found.append(f"{job['name']} ended with other weights than it should: {sha256}")
    for ends in real.values():
        if len({sha256 for sha256, _ in ends}) > 1:
            found.append(f"real jobs of one plan ended with different weights: {sorted(ends)}")
    return found


def check_artifacts(jobs: list[dict[str, Any]]) -> list[str]:
    home = Path(settings.HEADROOM_HOME)
    having = set(Artifact.objects.values_list("job_id", flat=True))
    ended = [job for job in jobs if job["state"] == State.SUCCEEDED]
    found = [f"{job['name']} succeeded and left nothing" for job in ended if job["pk"] not in having]
    for artifact in Artifact.objects.all().iterator():
        try:
            content = (home / artifact.file).read_bytes()
        except OSError as error:
            found.append(f"{artifact.file} of {artifact.job_id} cannot be read: {error}")
            continue
        if hashlib.sha256(content).hexdigest() != artifact.sha256:
            found.append(f"{artifact.file} of {artifact.job_id} is not what its sum says")
    return found


def check_leftovers() -> list[str]:
    home = Path(settings.HEADROOM_HOME)
    staged = [*home.glob("jobs/*/checkpoints/.tmp-*"), *home.glob("jobs/*/artifacts/*/*/.state.txt"), *home.glob("spool/*")]
    named = {Path(file).parts[:4] for file in Artifact.objects.values_list("file", flat=True)}
    unnamed = [path for path in home.glob("jobs/*/artifacts/f*") if path.relative_to(home).parts not in named]
    found = [f"{path.relative_to(home)} is left" for path in (*staged, *unnamed)]
    open_keys = IdempotencyKey.objects.filter(status=None).count()
    return [*found, *([f"{open_keys} idempotency keys are held by nobody's request"] if open_keys else [])]


def check_database() -> list[str]:
    if connection.vendor != "sqlite":
        return []
    own = sqlite3.connect(connection.settings_dict["NAME"])
    try:
        answer = [row[0] for row in own.execute("PRAGMA integrity_check")]
        broken = own.execute("PRAGMA foreign_key_check").fetchall()
    finally:
        own.close()
    return [*(line for line in answer if line != "ok"), *(f"a row points nowhere: {row}" for row in broken)]


def _measured(jobs: set[str]) -> Iterator[tuple[str, int, int, float]]:
    """(job, attempt, step, when by its own clock) of every step, also those that no row has: from the attempts' own files."""
    for job in jobs:
        for file in Path(settings.HEADROOM_HOME, "jobs", job, "attempts").glob("*/samples.jsonl"):
            for line in file.read_bytes().splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # the last line of a process that was killed
                if record["kind"] == "step":
                    yield job, record["attempt"], record["step"], record["time_s"]


def _rest(found: list[str]) -> list[str]:
    return [f"and {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
