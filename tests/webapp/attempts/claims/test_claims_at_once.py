"""Several workers claim at the same time, each with its own connection."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections

from tests.webapp.attempts.attempts import DONE
from tests.webapp.conftest import MACHINE_DOCUMENT, make_bench, make_person, make_spec, make_text, make_tiny_model
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_started
from webapp.catalog.actions import heartbeat_machine
from webapp.jobs.actions import create_job
from webapp.jobs.models import LIVE_STATES, Attempt, Event, Job

NUM_JOBS = 12
NUM_WORKERS = 4


def run_workers(work: Callable[..., Any]) -> None:
    """Run ``work(index)`` in one thread for each worker, all at once, to their ends."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(NUM_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.django_db
def test_a_look_at_an_empty_queue_is_one_question_and_locks_nothing(django_assert_num_queries: Any) -> None:
    machine = make_bench("bench")
    with django_assert_num_queries(1):
        assert claim_job(worker="w", machine=machine) is None


@pytest.mark.django_db(transaction=True)
def test_each_job_is_claimed_once_however_many_workers_ask() -> None:
    owner, model, dataset = make_person("ada"), make_tiny_model(), make_text()
    machines = [make_bench(f"bench {index}") for index in range(NUM_WORKERS)]
    for _ in range(NUM_JOBS):
        create_job(
            owner=owner, spec=make_spec(model, dataset), model=model, dataset=dataset,
            plan=None, prediction=None, machine=machines[0], actor="user:ada",
        )  # fmt: skip
    claimed, errors = [], []
    together = threading.Barrier(NUM_WORKERS)

    def work(index: int) -> None:
        try:
            together.wait()
            while (attempt := claim_job(worker=f"w{index}", machine=machines[index])) is not None:
                claimed.append(attempt.job_id)
                assert record_started(attempt, pid=1)
                assert finish_attempt(attempt, result=DONE, exit_code=0) == "succeeded"
        except Exception as error:
            errors.append(error)
        finally:
            connections.close_all()

    run_workers(work)

    assert errors == []
    assert Counter(claimed) == Counter(Job.objects.values_list("pk", flat=True))
    fences = list(Attempt.objects.values_list("fence", flat=True))
    assert sorted(fences) == list(range(1, NUM_JOBS + 1))
    assert set(Job.objects.values_list("state", flat=True)) == {"succeeded"}
    assert Event.objects.filter(kind="claimed").count() == NUM_JOBS


@pytest.mark.django_db(transaction=True)
def test_one_machine_asked_twice_at_once_does_not_lend_its_memory_twice() -> None:
    owner, model, dataset = make_person("ada"), make_tiny_model(), make_text()
    machine = make_bench(memory_bytes=100)
    for _ in range(4):
        create_job(
            owner=owner, spec=make_spec(model, dataset, goal={"device_budget_bytes": 60}), model=model, dataset=dataset,
            plan=None, prediction=None, machine=machine, actor="user:ada",
        )  # fmt: skip
    claimed = []
    together = threading.Barrier(NUM_WORKERS)

    def work(index: int) -> None:
        try:
            together.wait()
            claimed.append(claim_job(worker=f"w{index}", machine=machine))
        finally:
            connections.close_all()

    run_workers(work)
    assert len(claimed) == NUM_WORKERS
    assert sum(attempt is not None for attempt in claimed) == 1


@pytest.mark.django_db(transaction=True)
def test_jobs_over_the_same_machines_in_any_order_are_claimed_at_once_by_turns_and_never_in_part() -> None:
    owner, model, dataset = make_person("ada"), make_tiny_model(), make_text()
    machines = [make_bench(f"bench {index}") for index in range(NUM_WORKERS)]
    names = [machine.name for machine in machines]
    for index in range(NUM_WORKERS):
        order = names[index % NUM_WORKERS :] + names[: index % NUM_WORKERS]
        ranks = [{"device": f"{MACHINE_DOCUMENT['device']['name']}@{name}"} for name in order]
        create_job(
            owner=owner, spec=make_spec(model, dataset, machines=order), model=model, dataset=dataset,
            plan={"layout": {"num_devices": NUM_WORKERS, "ranks": ranks}}, prediction=None, machine=None, actor="user:ada",
        )  # fmt: skip
    claimed: list[str] = []
    errors: list[Exception] = []
    most_at_once: list[int] = []
    together = threading.Barrier(NUM_WORKERS)

    def work(index: int) -> None:
        try:
            together.wait()
            while len(claimed) < NUM_WORKERS and not errors:
                heartbeat_machine(machines[index])
                if (attempt := claim_job(worker=f"w{index}", machine=machines[index])) is None:
                    time.sleep(0.02)  # as idle workers do: SQLite lets in whoever asks next, and not who has waited longest
                    continue
                most_at_once.append(Job.objects.filter(state__in=LIVE_STATES).count())
                claimed.append(attempt.job_id)
                assert attempt.members.count() == NUM_WORKERS - 1
                finish_attempt(attempt, result=DONE, exit_code=0)
        except Exception as error:
            errors.append(error)
        finally:
            connections.close_all()

    run_workers(work)
    assert not errors
    assert sorted(claimed) == sorted(Job.objects.values_list("pk", flat=True))
    assert set(most_at_once) == {1}
