"""Any order of requests, claims, lost leases, stale writes and ends keeps the promises of the job states."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.webapp.conftest import make_bench, make_person, make_spec, make_text, make_tiny_model
from webapp.attempts import records
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.reconciling import expire_leases
from webapp.jobs import actions
from webapp.jobs.errors import WrongState
from webapp.jobs.models import LIVE_STATES, TERMINAL_STATES, Attempt, Job

LEGAL_MOVES = {
    ("", "queued"),
    ("queued", "starting"),
    ("queued", "cancelled"),
    ("starting", "running"),
    *((live, end) for live in LIVE_STATES for end in ("queued", *TERMINAL_STATES)),
}
RESULTS = st.sampled_from(
    [
        None,
        *(
            {
                "outcome": outcome,
                "reason": reason,
                "message": "",
                "error": None,
                "step": 3,
                "measured": None,
                "artifacts": [],
            }
            for outcome, reason in [
                ("succeeded", "done"),
                ("drained", ""),
                ("failed", "out_of_device_memory"),
                ("failed", "disk_full"),
            ]
        ),
    ]
)


class JobMachine(RuleBasedStateMachine):
    """One machine with room for everything; up to four jobs; every attempt ever made may speak again at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.savepoint = transaction.atomic()
        self.savepoint.__enter__()
        self.owner, self.model, self.dataset, self.machine = (
            make_person("ada"),
            make_tiny_model(),
            make_text(),
            make_bench(),
        )
        self.jobs: list[Any] = []
        self.attempts: list[Any] = []
        self.ended: dict[Any, Any] = {}

    def teardown(self) -> None:
        transaction.set_rollback(True)
        self.savepoint.__exit__(None, None, None)

    def a_job(self, data: st.DataObject) -> Job:
        return Job.objects.get(pk=data.draw(st.sampled_from(self.jobs)))

    def an_attempt(self, data: st.DataObject) -> Attempt:
        return data.draw(st.sampled_from(self.attempts))

    @precondition(lambda self: len(self.jobs) < 4)
    @rule()
    def submit(self) -> None:
        job = actions.create_job(
            owner=self.owner, spec=make_spec(self.model, self.dataset), model=self.model, dataset=self.dataset,
            plan=None, prediction=None, machine=self.machine, actor="user:ada",
        )  # fmt: skip
        self.jobs.append(job.pk)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), lease_s=st.sampled_from([30, -1]), by_hint=st.booleans())
    def claim(self, data: st.DataObject, lease_s: int, by_hint: bool) -> None:
        job_id = data.draw(st.sampled_from(self.jobs)) if by_hint else None
        attempt = claim_job(worker="w", machine=self.machine, job_id=job_id, lease_s=lease_s)
        if attempt is not None:
            self.attempts.append(attempt)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        attempt = self.an_attempt(data)
        before = Job.objects.get(pk=attempt.job_id)
        expected = before.state == "starting" and before.fence == attempt.fence
        assert records.record_started(attempt, pid=1) is expected

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        attempt = self.an_attempt(data)
        assert records.renew_lease(attempt).held is self.is_live(attempt)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), step=st.integers(0, 9))
    def progress(self, data: st.DataObject, step: int) -> None:
        attempt = self.an_attempt(data)
        is_live = self.is_live(attempt)
        assert records.record_progress(attempt, step=step, eta_s=None, summary={}) is is_live
        record = {"kind": "step", "step": step, "attempt": attempt.number}
        assert records.record_samples(attempt, [record]) is is_live

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), result=RESULTS)
    def finish(self, data: st.DataObject, result: dict[str, Any] | None) -> None:
        attempt = self.an_attempt(data)
        is_live = self.is_live(attempt)
        before = Job.objects.get(pk=attempt.job_id)
        answer = finish_attempt(attempt, result=result, exit_code=None)
        assert (answer != "stale") is is_live
        if not is_live:
            assert Job.objects.get(pk=attempt.job_id).event_seq == before.event_seq

    @rule()
    def expire(self) -> None:
        for job_id in expire_leases():
            assert Job.objects.get(pk=job_id).state not in LIVE_STATES

    @rule()
    def wait_for_retries(self) -> None:
        Job.objects.filter(state="queued").update(not_before=timezone.now())

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), mode=st.sampled_from(["save", "discard"]))
    def cancel(self, data: st.DataObject, mode: str) -> None:
        self.request(actions.cancel_job, self.a_job(data), mode=mode)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), action=st.sampled_from([actions.pause_job, actions.resume_job]))
    def pause_or_resume(self, data: st.DataObject, action: Callable[..., Any]) -> None:
        self.request(action, self.a_job(data))

    def request(self, action: Callable[..., Any], job: Job, **arguments: Any) -> None:
        try:
            action(job, actor="user:ada", **arguments)
        except WrongState:
            assert Job.objects.get(pk=job.pk).event_seq == job.event_seq

    def is_live(self, attempt: Attempt) -> bool:
        job = Job.objects.get(pk=attempt.job_id)
        return job.state in LIVE_STATES and job.fence == attempt.fence

    @invariant()
    def the_events_replay_to_the_row_by_legal_moves(self) -> None:
        for job in Job.objects.all():
            state = ""
            for index, event in enumerate(job.events.all(), start=1):
                assert event.seq == index
                assert event.from_state == state
                assert event.from_state == event.to_state or (event.from_state, event.to_state) in LEGAL_MOVES
                state = event.to_state
            assert (state, index) == (job.state, job.event_seq)

    @invariant()
    def the_end_is_final(self) -> None:
        for job_id, state in Job.objects.filter(state__in=TERMINAL_STATES).values_list("pk", "state"):
            assert self.ended.setdefault(job_id, state) == state
        assert set(self.ended) == set(Job.objects.filter(state__in=TERMINAL_STATES).values_list("pk", flat=True))

    @invariant()
    def fences_grow_and_an_attempt_that_ended_is_not_live(self) -> None:
        fences = list(Attempt.objects.order_by("pk").values_list("fence", flat=True))
        assert fences == sorted(set(fences))
        live = set(Job.objects.filter(state__in=LIVE_STATES).values_list("fence", flat=True))
        assert live == set(Attempt.objects.filter(ended_at__isnull=True).values_list("fence", flat=True))

    @invariant()
    def no_job_fails_more_often_than_allowed(self) -> None:
        assert not Job.objects.filter(failed_attempts__gt=5).exists()


@pytest.mark.django_db
def test_the_promises_hold_in_any_order() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        JobMachine,
        settings=settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=checks),
    )
