"""Jobs over several machines that go on without one which stays away."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from pytest_django import Settings

from optimizer.base.units import GIB
from optimizer.plan.plan import Plan
from tests.webapp.attempts.attempts import kinds, reread, run
from tests.webapp.conftest import make_bench, make_spec
from webapp.attempts.claiming import claim_job
from webapp.attempts.reconciling import expire_leases
from webapp.attempts.records import record_checkpoint
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.actions import pause_job
from webapp.jobs.devices.joined import ranks_by_machine
from webapp.jobs.models import Job, Member
from webapp.jobs.queue import read_queue
from webapp.planning.moving_on import MovingOn
from webapp.planning.submitting import submit_job

pytestmark = pytest.mark.django_db

AWAY_S = 600
Submit = Callable[..., Job]


@pytest.fixture(autouse=True)
def _at_once(settings: Settings) -> None:
    settings.HEADROOM_RETRY_BASE_S = 0
    settings.HEADROOM_AWAY_S = AWAY_S


@pytest.fixture
def submit(ada: User, profiled_llama: Model, dataset: Dataset) -> Submit:
    """A job with ranks on all of the machines named."""

    def submit(*machines: str, pins: dict[str, Any] | None = None, **goal: Any) -> Job:
        for machine in machines:
            make_bench(machine, memory_bytes=GIB)
        spec = make_spec(
            profiled_llama,
            dataset,
            goal={"device_budget_bytes": GIB, "pins": pins or {}, **goal},
            workload={"sequence_length": 128, "global_batch_size": 12, "num_steps": 10},
            machines=list(machines),
            link="100Gbit,0.01ms",
        )
        job = submit_job(ada, spec=spec, actor="user:ada")
        assert set(ranks_by_machine(job)) == set(machines)
        return job

    return submit


def lose(job: Job) -> None:
    """The job's attempt with a checkpoint behind it, whose worker is lost."""
    leader = Machine.objects.get(name=next(iter(ranks_by_machine(job))))
    attempt = run(leader)
    assert record_checkpoint(attempt, step=4, folder="step-4", manifest_sha256="0" * 64, num_bytes=10)
    past = timezone.now() - timedelta(seconds=1)
    Job.objects.filter(pk=job.pk).update(lease_until=past)
    Member.objects.update(lease_until=past)
    assert expire_leases() == [job.pk]


def stay_away(name: str, *, seconds: float = AWAY_S + 60) -> None:
    Machine.objects.filter(name=name).update(last_seen_at=timezone.now() - timedelta(seconds=seconds))


def sentence(user: User) -> str:
    (waiting,) = read_queue(user).waiting
    return waiting.sentence


def test_a_job_goes_on_where_it_can_once_a_machine_has_been_away_for_long(ada: User, submit: Submit) -> None:
    job = submit("home", "office")
    lose(job)
    stay_away("office", seconds=AWAY_S - 60)
    assert MovingOn().pass_once() == []
    assert sentence(ada) == (
        "It runs on home and office at once; no worker of office takes jobs at present. If that lasts for 10 min, it goes on "
        "without, where a plan fits."
    )
    stay_away("office")
    assert MovingOn().pass_once() == [job.pk]
    job = reread(job)
    assert ranks_by_machine(job) == {}
    assert not job.joined.exists()
    assert "machines" not in job.spec
    assert "link" not in job.spec
    assert kinds(job)[-1] == "replanned"
    said = job.events.latest("seq").message
    assert said.startswith("office has been away for 10 min; the job goes on with home: ")
    attempt = claim_job(worker="w", machine=Machine.objects.get(name="home"))
    assert attempt is not None
    assert Plan.from_json(attempt.plan).layout.num_devices == 1
    assert not attempt.members.exists()
    assert MovingOn().pass_once() == []


def test_of_three_machines_two_go_on_together(submit: Submit) -> None:
    job = submit("home", "office", "attic")
    lose(job)
    Machine.objects.filter(name="office").delete()
    assert MovingOn().pass_once() == [job.pk]
    job = reread(job)
    assert job.spec["machines"] == ["home", "attic"]
    assert job.spec["goal"]["num_devices"] == 2
    assert set(ranks_by_machine(job)) <= {"home", "attic"}
    assert set(job.joined.values_list("name", flat=True)) == set(ranks_by_machine(job))


def test_the_form_of_its_checkpoint_stays(submit: Submit) -> None:
    job = submit("home", "office")
    lose(job)
    # these machines have no rates for it, so that no plan for home keeps it
    Job.objects.filter(pk=job.pk).update(plan={**job.plan, "weights": {**job.plan["weights"], "dtype": "bf16"}})
    stay_away("office")
    assert MovingOn().pass_once() == []
    job.checkpoints.all().delete()
    assert MovingOn().pass_once() == [job.pk]


def test_what_demands_the_machine_waits_and_is_not_searched_again(
    submit: Submit, caplog: pytest.LogCaptureFixture
) -> None:
    job = submit("home", "office", pins={"layout": {"num_devices": 2}})
    lose(job)
    stay_away("office")
    moving_on = MovingOn()
    with caplog.at_level("INFO"):
        assert moving_on.pass_once() == []
        assert moving_on.pass_once() == []
    assert [record.message.partition(":")[0] for record in caplog.records] == [f"{job.pk} waits on for office"]
    assert reread(job).spec == job.spec
    assert not reread(job).awaits_plan


def test_who_has_not_begun_or_is_paused_waits(submit: Submit) -> None:
    job = submit("home", "office")
    stay_away("office")
    assert MovingOn().pass_once() == []
    stay_away("office", seconds=0)
    lose(job)
    stay_away("office")
    pause_job(reread(job), actor="user:ada")
    assert MovingOn().pass_once() == []


def test_for_ever_is_a_choice(ada: User, submit: Submit, settings: Settings) -> None:
    job = submit("home", "office")
    lose(job)
    stay_away("office")
    settings.HEADROOM_AWAY_S = 0
    assert MovingOn().pass_once() == []
    assert sentence(ada) == "It runs on home and office at once; no worker of office takes jobs at present."
