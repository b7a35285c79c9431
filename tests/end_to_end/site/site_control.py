"""A worker and a person at the record of a running site: makes jobs, measures steps, ends jobs.

``python -m tests.end_to_end.site.site_control``: one JSON line ``[command, arguments]`` in, one JSON line out. A process
of its own, so that it uses the site's database and never the one that pytest-django made.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import django

ATTEMPTS: dict[Any, Any] = {}


def seed() -> int:
    """A person, and what the pages list."""
    from tests.webapp.pages import rows

    ada = rows.make_user("ada")
    rows.make_machine()
    rows.make_model()
    rows.make_dataset()
    return ada.pk


def catalog() -> dict[str, str]:
    """Ids of what the pages of a dataset and a machine show; runs that ended on the machine, a dataset with lengths."""
    from django.contrib.auth.models import User

    from tests.webapp.pages import rows
    from webapp.catalog.models import Dataset, Machine

    for number in range(3):
        job_id = new_job(name=f"earlier-{number}")
        begin(job_id=job_id)
        succeed(job_id=job_id)
    facts = {
        "num_characters": 4_300_000,
        "records": ["In the beginning God created the heaven and the earth.", "And the earth was without form, and void."],
        "lengths": [[64, 310], [128, 2400], [256, 1800], [512, 90]],
    }
    dataset = rows.make_dataset(User.objects.get(username="ada"), name="verses")
    Dataset.objects.filter(pk=dataset.pk).update(facts=facts)
    return {"dataset": dataset.pk, "machine": Machine.objects.get(name="workbench").pk}


def access() -> dict[str, str]:
    """Ids of what the pages of projects and webhooks show: one with members, one webhook with a message on its way."""
    from django.contrib.auth.models import User

    from tests.webapp.pages import rows
    from webapp.accounts.projects import create_project, set_member
    from webapp.webhooks.actions import create_webhook, send_test

    ada = User.objects.get(username="ada")
    User.objects.filter(pk=ada.pk).update(is_superuser=True)
    rows.make_user("eve")
    project = create_project(ada, name="verses")
    set_member(project, username="eve", role="viewer")
    webhook, _ = create_webhook(ada, project, url="https://example.com/hooks/headroom", events=["job.succeeded"])
    send_test(webhook)
    return {"project": project.pk, "webhook": webhook.pk}


def rare() -> dict[str, Any]:
    """Ids of what pages show seldom: a machine that was measured beside other work, a model that was not read whole, a generation
    that failed, a paused job, a project that one person is alone in; and two people, one who only looks, one who has nothing.
    """
    from django.contrib.auth.models import User

    from optimizer.hardware.machine import PROBE_DISTURBED_FACT
    from tests.webapp.pages import rows
    from webapp.accounts.access import project_for_new
    from webapp.accounts.projects import create_project, set_account_role, set_member
    from webapp.attempts.outcome import finish_attempt
    from webapp.catalog.models import Link, Machine, Model
    from webapp.jobs.actions import pause_job
    from webapp.jobs.links.probing import ask_for_links, record_failure, record_measured
    from webapp.jobs.models import Job

    ada = User.objects.get(username="ada")
    machine = rows.make_machine("shared-box")
    slow = "others used the machine while it was measured, which took 2.1 times as long as alone; probe it again when it is quiet"
    Machine.objects.filter(pk=machine.pk).update(document=machine.document | {"facts": {PROBE_DISTURBED_FACT: slow}})
    ask_for_links(machine)
    link = Link.objects.get()
    record_measured(link, round_trip_s=0.00042, bytes_per_s_by_size=((65536, 5.1e7), (1048576, 1.03e8), (16777216, 1.17e8)))
    away = "no answer within 5 s; let the two connect to each other on any TCP port (firewall)"
    record_failure(link, f"shared-box cannot reach workbench at 192.168.1.20, port 41234: {away}")
    model = rows.make_model(ada, name="half-read")
    rows.make_model(ada, name="Meta-Llama-3.1-8B-Instruct-abliterated-and-tuned-again-for-long-names")
    told = ["of the config not read: layerdrop 0.1", "the config brings code of its own, which is not run"]
    Model.objects.filter(pk=model.pk).update(unread=told)
    failed = rows.make_generate_job(ada, name="answers-cut-short")
    attempt = rows.start(failed)
    message = "model is refused: model.safetensors has no tensor lm_head.weight"
    result = {"outcome": "failed", "reason": "bad_model", "message": message, "error": None, "step": 0, "measured": None}
    result |= {"summary": {}, "artifacts": []}
    finish_attempt(attempt, result=result, exit_code=1)
    paused = rows.make_job(ada, name="later-maybe")
    begin(job_id=paused.pk)
    measure(job_id=paused.pk, first=1, last=12)
    finish_attempt(ATTEMPTS[paused.pk], result=None, exit_code=-9)
    pause_job(Job.objects.get(pk=paused.pk), actor="user:ada")
    for name in ("vera", "newcomer"):
        rows.make_user(name)
    set_member(project_for_new(ada), username="vera", role="viewer")
    set_account_role(User.objects.get(username="vera"), role="viewer")
    alone = create_project(ada, name="alone")
    ids = {"machine-uncertain": machine.pk, "model-unread": model.pk, "project-alone": alone.pk}
    return ids | {"failed-generation": failed.pk, "paused-job": paused.pk, "home": project_for_new(ada).pk}


def add_writer(*, profile_file: str) -> dict[str, str]:
    """A model that generates, whose profile is known, and prompts for it."""
    from django.contrib.auth.models import User

    from tests.webapp.generation import make_prompts, make_writer

    writer = make_writer(json.loads(Path(profile_file).read_text()))
    lines = [{"prompt": f"In the beginning, verse {number}", "max_new_tokens": 4 + number % 3} for number in range(12)]
    prompts = make_prompts(*lines, owner=User.objects.get(username="ada"), name="verses-to-go-on")
    return {"writer": writer.pk, "prompts": prompts.pk}


def add_llama(*, profile_file: str) -> str:
    """A model whose profile is known, so that jobs of it can be priced."""
    from optimizer.models.spec import read_model_spec
    from tests import llama
    from tests.webapp.conftest import give_tokenizer
    from webapp.catalog.actions import keep_profile
    from webapp.catalog.models import Model

    spec = read_model_spec(llama.CONFIG)
    give_tokenizer("models/llama")
    row = Model.objects.create(
        name="llama",
        model_type="llama",
        config=spec.to_config(),
        fingerprint=spec.fingerprint,
        folder="models/llama",
        has_tokenizer=True,
    )
    keep_profile(spec.fingerprint, json.loads(Path(profile_file).read_text()))
    return row.pk


def newest_job() -> dict[str, Any]:
    from webapp.jobs.models import Job

    job = Job.objects.latest("created_at")
    return {"id": job.pk, "name": job.name, "spec": job.spec, "plan": job.plan, "prediction": job.prediction}


def new_job(*, name: str) -> str:
    from django.contrib.auth.models import User

    from tests.webapp.pages import rows

    return rows.make_job(User.objects.get(username="ada"), name=name).pk


def new_generate_job(*, name: str) -> str:
    """At work, measured for a minute, with two answers."""
    from django.conf import settings
    from django.contrib.auth.models import User

    from tests.webapp.pages import rows
    from webapp.attempts.records import record_phase, record_progress, record_samples

    job = rows.make_generate_job(User.objects.get(username="ada"), name=name)
    attempt = ATTEMPTS[job.pk] = rows.start(job)
    assert record_phase(attempt, "generating")
    assert record_samples(attempt, [rows.generate_record(attempt, number) for number in range(1, 61)])
    summary = {"tokens_per_s": 121.0, "num_errors": 1, "device_peak_bytes": sum(rows.GENERATION_PEAK.values())}
    assert record_progress(attempt, step=120, eta_s=60.0, summary=summary, num_tokens=7200)
    folder = settings.HEADROOM_HOME / "jobs" / job.pk / "results"
    folder.mkdir(parents=True)
    answers = ["And the earth was without form.", "He called the light Day."]
    lines = [
        {"index": index, "record": {"id": f"q{index}", "text": text, "finish_reason": "stop"}, "completion_tokens": 7}
        for index, text in enumerate(answers)
    ]
    (folder / "part-001-f1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return job.pk


def begin(*, job_id: str) -> None:
    from tests.webapp.pages import rows
    from webapp.jobs.models import Job

    ATTEMPTS[job_id] = rows.start(Job.objects.get(pk=job_id))


def new_small_generate_job(*, name: str) -> str:
    """Over after one moment: nothing was on the host, nothing waited, and it was too short for a speed."""
    from django.contrib.auth.models import User

    from tests.webapp.pages import rows
    from webapp.attempts.outcome import finish_attempt
    from webapp.attempts.records import record_samples
    from webapp.jobs.models import Job

    job = rows.make_generate_job(User.objects.get(username="ada"), name=name)
    Job.objects.filter(pk=job.pk).update(prediction={**job.prediction, "host_peak_bytes": 0, "exposed_ms": {}})
    attempt = rows.start(job)
    alone = {"host_bytes": 0, "copied_bytes": {}, "lane_ms": {"compute": 9.0}, "stall_ms": {}, "tokens_per_s": None}
    assert record_samples(attempt, [{**rows.generate_record(attempt, 1), **alone}])
    result = {"outcome": "succeeded", "reason": "done", "message": "finished", "error": None, "step": 1, "artifacts": []}
    assert finish_attempt(attempt, result=result, exit_code=0) == "succeeded"
    return job.pk


def measure(*, job_id: str, first: int, last: int) -> int:
    """Steps as a worker reports them: into the database, then onto the wire. Returns how many were not taken by the wire."""
    from tests.webapp.pages import rows
    from webapp.attempts.records import record_progress, record_samples
    from webapp.wire.publish import publish

    attempt = ATTEMPTS[job_id]
    records = [rows.step_record(attempt, step) for step in range(first, last + 1)]
    records += [rows.eval_record(attempt, step) for step in range(first - 1, last + 1) if step % 25 == 0]
    records.append(rows.timeline_record(attempt, last))
    assert record_samples(attempt, records)
    newest = records[last - first]
    summary = {name: newest[name] for name in ("loss", "tokens_per_s", "device_peak_bytes", "step_ms")}
    assert record_progress(attempt, step=last, eta_s=(rows.NUM_STEPS - last) * 1.65, summary=summary)
    return sum(not publish(job_id, "sample", record) for record in records)


def fill(*, job_id: str, num_points: int) -> None:
    from tests.webapp.pages import rows

    rows.fill(ATTEMPTS[job_id], num_points=num_points)


def keep_checkpoint(*, job_id: str, step: int) -> None:
    from webapp.attempts.records import record_checkpoint

    attempt = ATTEMPTS[job_id]
    folder = f"checkpoints/step-{step:06d}-f{attempt.fence}"
    assert record_checkpoint(attempt, step=step, folder=folder, manifest_sha256="c0" * 32, num_bytes=176 * 1024**2)


def succeed(*, job_id: str) -> str:
    from django.conf import settings

    from tests.webapp.exported import write_files
    from tests.webapp.pages import rows
    from webapp.attempts.outcome import finish_attempt

    result = {
        "outcome": "succeeded",
        "reason": "done",
        "message": "finished 120 steps; the measured peak of 411 MiB stayed under its budget of 480 MiB",
        "error": None,
        "step": rows.NUM_STEPS,
        "measured": {
            "device_peak_bytes": sum(rows.PEAK.values()) + 2 * 1024**2,
            "device_bytes_by_category": dict(rows.PEAK, activations=178 * 1024**2),
            "host_peak_bytes": 64 * 1024**2,
            "step_ms": 1642.0,
            "num_steps": rows.NUM_STEPS,
        },
        "summary": {"loss": 2.49, "validation_loss_start": 7.0, "validation_loss": 2.58, "tokens_per_s": 1244.0},
        "artifacts": write_files(job_id, settings.HEADROOM_HOME),
    }
    return finish_attempt(ATTEMPTS[job_id], result=result, exit_code=0)


def run_out_of_memory(*, job_id: str) -> str:
    from tests.webapp.pages import rows
    from webapp.attempts.outcome import finish_attempt

    result = rows.out_of_memory_result(moment="at step 3, in the forward of block 9 of 12")
    return finish_attempt(ATTEMPTS[job_id], result=result, exit_code=1)


def answer_commands(commands: Mapping[str, Any]) -> None:
    """Calls what each line of stdin names, until there are no more."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
    django.setup()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(commands[name](**arguments)), flush=True)


if __name__ == "__main__":
    answer_commands(globals())
