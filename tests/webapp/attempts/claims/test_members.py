"""Parts of attempts over several machines: a lost one is named and the whole job goes on later, and a drained one saves first."""

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from pytest_django import Settings

from tests.webapp.attempts.attempts import DRAINED, failed, kinds
from tests.webapp.attempts.claims.test_gangs import make_host
from tests.webapp.attempts.claims.test_joined import CARD, claim, go_away
from tests.webapp.conftest import make_spec, make_text, make_tiny_model
from webapp.attempts.losses import MAX_LOSSES_BLAMED
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.reconciling import expire_members, give_back_all_of
from webapp.attempts.records import record_started, renew_lease
from webapp.catalog.models import Machine
from webapp.jobs.actions import create_job
from webapp.jobs.devices.members import ask_to_drain, end_member, lose_member, renew_member, take_member
from webapp.jobs.models import Attempt, Event, Job, Member


@pytest.fixture(autouse=True)
def _at_once(settings: Settings) -> None:
    settings.HEADROOM_RETRY_BASE_S = 0


@pytest.fixture
def machines(db: None) -> tuple[Machine, Machine]:
    return make_host(1, name="home"), make_host(1, name="office")


@pytest.fixture
def job(ada: User, machines: tuple[Machine, Machine]) -> Job:
    model, dataset = make_tiny_model(), make_text()
    ranks = [{"device": f"{CARD}@{machine.name}"} for machine in machines]
    return create_job(
        owner=ada,
        spec=make_spec(model, dataset, machines=["home", "office"]),
        model=model,
        dataset=dataset,
        plan={"layout": {"num_devices": 2, "ranks": ranks}},
        prediction=None,
        machine=machines[0],
        actor="user:ada",
    )


def begin(job: Job, machines: tuple[Machine, Machine], *, takes: bool = True) -> tuple[Attempt, Member]:
    """Both parts under way; the second not taken unless ``takes``."""
    assert claim(machines[0]) == (job.pk, [0])
    attempt = Attempt.objects.get(job=job, ended_at__isnull=True)
    record_started(attempt, pid=1)
    member = take_member(machines[1], worker="office:1", lease_s=30) if takes else Member.objects.get(attempt=attempt)
    assert member is not None
    return attempt, member


def expire(member: Member) -> None:
    Member.objects.filter(pk=member.pk).update(lease_until=timezone.now() - timedelta(seconds=1))


def last(job: Job) -> dict[str, Any]:
    job.refresh_from_db()
    return {"state": job.state, "reason": job.reason, "message": job.message, "failed": job.failed_attempts}


LOST = {"state": "queued", "reason": "worker_lost", "message": "office was lost", "failed": 0}


def test_a_part_that_lost_its_lease_takes_the_whole_job_back_by_name(
    job: Job, machines: tuple[Machine, Machine]
) -> None:
    attempt, member = begin(job, machines)
    assert expire_members() == []
    expire(member)
    assert expire_members() == [job.pk]
    assert last(job) == LOST
    assert not renew_lease(attempt).held
    assert not renew_member(member, lease_s=30).held
    assert expire_members() == []
    again, _ = begin(job, machines)
    assert again.fence > attempt.fence


def test_a_part_that_nobody_takes_is_named_as_well(job: Job, machines: tuple[Machine, Machine]) -> None:
    _, member = begin(job, machines, takes=False)
    expire(member)
    assert expire_members() == [job.pk]
    assert last(job)["message"] == "office did not begin its part of the job in time"


def test_one_that_cannot_go_on_says_why(job: Job, machines: tuple[Machine, Machine]) -> None:
    _, member = begin(job, machines)
    lose_member(member, "the disk is full")
    assert expire_members() == [job.pk]
    assert last(job)["message"] == "office gave up its part of the job: the disk is full"


def test_a_renewed_lease_is_not_taken(job: Job, machines: tuple[Machine, Machine]) -> None:
    _, member = begin(job, machines)
    expire(member)
    assert renew_member(member, lease_s=30).held
    assert expire_members() == []
    end_member(member)
    assert not renew_member(member, lease_s=30).held


def test_the_leader_names_the_lost_machine_by_its_result(job: Job, machines: tuple[Machine, Machine]) -> None:
    attempt, member = begin(job, machines)
    result = {**failed("worker_lost"), "lost_machine": "office"}
    assert finish_attempt(attempt, result=result, exit_code=1) == "worker_lost"
    assert last(job) == LOST
    # its processes may be there until its lease is over
    assert claim(machines[0]) is None
    expire(member)
    assert claim(machines[0]) == (job.pk, [0])


def test_what_a_worker_held_that_is_gone_is_given_back_at_once_and_its_devices_are_free(
    job: Job, machines: tuple[Machine, Machine]
) -> None:
    attempt, member = begin(job, machines)
    assert give_back_all_of("office:2", actor="worker:office:3") == []
    assert give_back_all_of("office:1", actor="worker:office:3") == [job.pk]
    died = "its process died, and another one was started"
    assert last(job) == {**LOST, "message": f"office gave up its part of the job: {died}"}
    member.refresh_from_db()
    assert (member.is_lost, member.trouble) == (True, died)
    assert Event.objects.filter(job=job).latest("seq").actor == "worker:office:3"
    assert not renew_lease(attempt).held

    again, part = begin(job, machines)
    assert give_back_all_of(again.worker, actor="worker:home:3") == [job.pk]
    assert last(job)["message"] == f"the worker was lost: {died}"
    again.refresh_from_db()
    assert (again.outcome, again.exit_code) == ("worker_lost", None)
    assert not renew_member(part, lease_s=30).held


def test_a_worker_that_drains_ends_the_attempt_at_a_checkpoint_which_costs_nothing(
    job: Job, machines: tuple[Machine, Machine]
) -> None:
    attempt, member = begin(job, machines)
    assert not renew_lease(attempt).drains
    ask_to_drain(member)
    assert renew_lease(attempt).drains
    assert finish_attempt(attempt, result=DRAINED, exit_code=75) == "drained"
    assert last(job) == {"state": "queued", "reason": "", "message": "the worker of office was asked to stop", "failed": 0}


def test_a_job_is_blamed_by_what_became_of_others_on_the_lost_machine(
    job: Job, machines: tuple[Machine, Machine]
) -> None:
    # others end well on the machine that leads all the while, and nothing runs on the lost one
    for _ in range(MAX_LOSSES_BLAMED + 1):
        attempt, member = begin(job, machines)
        other = Attempt.objects.create(
            job=make_other(job), number=Attempt.objects.count(), fence=-member.pk, worker="home:2", machine=machines[0]
        )
        Attempt.objects.filter(pk=other.pk).update(outcome="succeeded", ended_at=timezone.now() + timedelta(hours=1))
        expire(member)
        assert expire_members() == [job.pk]
        assert last(job)["state"] == "queued", attempt
    assert "failed" not in kinds(job)


def make_other(job: Job) -> Job:
    ended = {"state": "succeeded", "finished_at": timezone.now()}
    return Job.objects.create(owner=job.owner, project=job.project, name="other", model=job.model, spec={}, **ended)


def test_a_lost_machine_is_not_asked_again_before_it_is_heard_of(job: Job, machines: tuple[Machine, Machine]) -> None:
    _, member = begin(job, machines)
    go_away(machines[1])
    expire(member)
    assert expire_members() == [job.pk]
    assert claim(machines[0]) is None
    Machine.objects.update(last_seen_at=timezone.now())
    assert claim(machines[0]) == (job.pk, [0])
    claimed = Event.objects.filter(job=job, kind="claimed").order_by("seq").values_list("message", flat=True)
    assert list(claimed) == ["with office", "with office"]
