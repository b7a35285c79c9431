"""Jobs over several machines: one claim for all of them or none, whom they keep devices from, and what the queue says of them."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from optimizer.base.errors import InvalidPlan
from optimizer.base.units import GIB
from tests.webapp.attempts.claims.test_gangs import claim, end, make_host
from tests.webapp.conftest import MACHINE_DOCUMENT, make_spec
from webapp.attempts.claiming import claim_job
from webapp.catalog.actions import heartbeat_machine
from webapp.catalog.models import Machine
from webapp.jobs.actions import create_job, pause_job, set_priority
from webapp.jobs.devices.members import end_member, take_member
from webapp.jobs.devices.named import read_needs, write_needs
from webapp.jobs.devices.room import DESKTOP_BYTES, read_room
from webapp.jobs.documents import attempt_documents
from webapp.jobs.fleet import read_occupancy
from webapp.jobs.models import Attempt, Job, Member
from webapp.jobs.queue import read_queue

CARD = MACHINE_DOCUMENT["device"]["name"]
Need = Callable[..., Job]


@pytest.fixture
def home(db: None) -> Machine:
    return make_host(1, name="home")


@pytest.fixture
def office(db: None) -> Machine:
    return make_host(2, name="office")


@pytest.fixture
def join(ada: User, make_job: Callable[..., Job]) -> Need:
    """A queued job with a rank on a device of each of the machines named, each with so many GiB."""

    def join(*machines: str, gib: int = 5) -> Job:
        like = make_job()
        like.delete()
        ranks = [{"device": f"{CARD}@{machine}"} for machine in machines]
        goal = {"device_budget_bytes": gib * GIB}
        job = create_job(
            owner=ada,
            spec=make_spec(like.model, like.dataset, machines=list(dict.fromkeys(machines)), goal=goal),
            model=like.model,
            dataset=like.dataset,
            plan={"layout": {"num_devices": len(ranks), "ranks": ranks}},
            prediction=None,
            machine=None,
            actor="user:ada",
        )
        # without what a process takes of a card beside its tensors
        needs = [need._replace(num_bytes=gib * GIB) for need in read_needs(job.need_ranks)]
        Job.objects.filter(pk=job.pk).update(need_ranks=write_needs(needs))
        return Job.objects.get(pk=job.pk)

    return join


@pytest.fixture
def narrow(make_job: Callable[..., Job]) -> Need:
    """A queued job of one device, on whichever machine."""

    def narrow(gib: int = 5) -> Job:
        job = make_job()
        Job.objects.filter(pk=job.pk).update(need_device_kind="cuda", need_device_bytes=gib * GIB)
        return Job.objects.get(pk=job.pk)

    return narrow


def members(job: Job) -> list[tuple[str, list[int], list[int]]]:
    found = Member.objects.filter(attempt__job=job).order_by("pk")
    return [(member.machine_name, member.ranks, member.devices) for member in found]


def free_gib(machine: Machine) -> list[int]:
    return [device.free_bytes // GIB for device in read_room(machine).devices]


def go_away(machine: Machine) -> None:
    Machine.objects.filter(pk=machine.pk).update(last_seen_at=timezone.now() - timedelta(seconds=60))


def test_one_claim_takes_the_devices_of_all_machines_under_one_fence(home: Machine, office: Machine, join: Need) -> None:
    job = join("home", "office", "office")
    assert claim(home) == (job.pk, [0])
    assert members(job) == [("office", [1, 2], [0, 1])]
    assert (free_gib(home), free_gib(office)) == ([3], [3, 3])
    job.refresh_from_db()
    assert list(Attempt.objects.filter(job=job).values_list("fence", flat=True)) == [job.fence]


def test_ranks_of_one_machine_need_not_stand_together(home: Machine, office: Machine, join: Need) -> None:
    job = join("office", "home", "office")
    assert claim(office) == (job.pk, [0, 1])
    assert members(job) == [("home", [1], [0])]


def test_the_machine_of_the_first_rank_leads_and_no_other_claims(home: Machine, office: Machine, join: Need) -> None:
    job = join("home", "office")
    assert claim(office) is None
    assert claim(home) == (job.pk, [0])


def test_nothing_is_taken_where_one_machine_lacks_the_room(
    home: Machine, office: Machine, join: Need, narrow: Need
) -> None:
    first, job = narrow(), join("home", "office", "office")
    assert claim(office) == (first.pk, [0])
    assert claim(home) is None
    assert (members(job), free_gib(home)) == ([], [8])
    end(first)
    assert claim(home) == (job.pk, [0])


def test_nothing_is_taken_where_one_machine_is_not_there_or_drains(home: Machine, office: Machine, join: Need) -> None:
    job = join("home", "office")
    go_away(office)
    assert claim(home) is None
    Machine.objects.filter(pk=office.pk).update(last_seen_at=timezone.now(), draining=True)
    assert claim(home) is None
    Machine.objects.filter(pk=office.pk).update(draining=False)
    assert claim(home) == (job.pk, [0])


def test_it_shares_no_device_with_others(home: Machine, office: Machine, join: Need, narrow: Need) -> None:
    first, job = narrow(1), join("home", "office", gib=1)
    assert claim(home) == (first.pk, [0])
    assert claim(home) is None
    end(first)
    assert claim(home) == (job.pk, [0])


def test_each_machine_keeps_its_devices_from_jobs_behind(
    home: Machine, office: Machine, join: Need, narrow: Need
) -> None:
    first, job, later = narrow(), join("home", "office", "office"), narrow(1)
    assert claim(office) == (first.pk, [0])
    assert (claim(office), claim(home)) == (None, None)
    end(first)
    assert claim(office) is None
    assert claim(home) == (job.pk, [0])
    assert claim(office) == (later.pk, [0])


def test_devices_that_it_does_not_name_stay_in_use(home: Machine, office: Machine, join: Need, narrow: Need) -> None:
    first, _, later = narrow(), join("home", "office"), narrow(1)
    assert claim(home) == (first.pk, [0])
    assert claim(office) == (later.pk, [1])
    assert claim(office) is None


def test_a_job_that_waits_for_an_absent_machine_keeps_nothing(
    home: Machine, office: Machine, join: Need, narrow: Need
) -> None:
    join("home", "office")
    later = narrow()
    go_away(office)
    assert claim(home) == (later.pk, [0])


def test_a_job_of_higher_priority_goes_first_and_a_paused_one_keeps_nothing(
    home: Machine, office: Machine, join: Need, narrow: Need
) -> None:
    job, urgent, later = join("home", "office"), narrow(), narrow()
    set_priority(urgent, 5, actor="test", may_overtake=True)
    assert claim(home) == (urgent.pk, [0])
    pause_job(job, actor="test")
    assert claim(office) == (later.pk, [0])


def test_two_such_jobs_go_in_the_order_of_the_queue_on_all_machines(home: Machine, office: Machine, join: Need) -> None:
    first, second = join("home", "office", "office"), join("office", "home")
    assert claim(office) is None
    assert claim(home) == (first.pk, [0])
    assert claim(office) is None
    Member.objects.update(ended_at=timezone.now())
    end(first)
    assert claim(office) == (second.pk, [0])


def test_what_other_programs_hold_on_each_machine_is_not_free_while_its_part_loads(
    home: Machine, office: Machine, join: Need
) -> None:
    heartbeat_machine(office, used_bytes=[DESKTOP_BYTES + 2 * GIB, DESKTOP_BYTES + GIB])
    join("home", "office")
    assert claim(home, used_bytes=[DESKTOP_BYTES + 3 * GIB]) is not None
    heartbeat_machine(home, used_bytes=[DESKTOP_BYTES + 3 * GIB])
    assert free_gib(Machine.objects.get(pk=home.pk)) == [0]
    assert free_gib(Machine.objects.get(pk=office.pk)) == [6, 2]


def test_a_member_is_taken_once_and_holds_its_devices_until_it_has_ended(
    home: Machine, office: Machine, join: Need, narrow: Need
) -> None:
    job = join("home", "office", "office")
    claim(home)
    assert take_member(home, worker="home:1", lease_s=30) is None
    member = take_member(office, worker="office:1", lease_s=30)
    assert member is not None
    assert (member.attempt.job_id, member.ranks, member.devices) == (job.pk, [1, 2], [0, 1])
    assert take_member(office, worker="office:2", lease_s=30) is None
    end(job)
    narrow(6)
    assert free_gib(office) == [3, 3]
    assert claim(office) is None
    end_member(member)
    assert free_gib(office) == [8, 8]


def test_a_machines_page_and_the_list_of_attempts_show_its_part(
    ada: User, home: Machine, office: Machine, join: Need
) -> None:
    job = join("home", "office", "office")
    claim(home)
    (holder,) = read_occupancy(ada, office).holders
    assert (holder.job_id, holder.devices, holder.needs_bytes) == (job.pk, (0, 1), 10 * GIB)
    Attempt.objects.update(plan=None)  # which here has nothing but a layout
    (document,) = attempt_documents(job.attempts.select_related("job"))
    (part,) = document["members"]
    assert {name: part[name] for name in ("machine", "worker", "ranks", "devices")} == {
        "machine": "office", "worker": "", "ranks": [1, 2], "devices": [0, 1]
    }  # fmt: skip
    assert (document["devices"], part["is_lost"], part["ended_at"]) == ([0], False, None)


def test_parts_that_nobody_took_are_free_when_the_attempt_ends(home: Machine, office: Machine, join: Need) -> None:
    job = join("home", "office")
    claim(home)
    end(job)
    assert take_member(office, worker="office:1", lease_s=30) is None
    assert free_gib(office) == [8, 8]


def test_a_claim_of_one_job_by_its_id_leaves_another_over_machines_alone(
    home: Machine, office: Machine, join: Need, narrow: Need
) -> None:
    join("office", "home")
    wanted = narrow(1)
    attempt = claim_job(worker="w", machine=office, job_id=wanted.pk)
    assert attempt is not None
    assert attempt.job_id == wanted.pk


def test_a_rank_that_names_no_device_of_the_machines_is_refused(home: Machine, office: Machine, join: Need) -> None:
    with pytest.raises(InvalidPlan, match=r"ranks\[1\]\.device is 'test processor@attic'; allowed on these machines: test "):
        join("home", "attic")


def test_the_queue_says_what_it_waits_for_by_machine(
    ada: User, home: Machine, office: Machine, join: Need, narrow: Need
) -> None:
    def said(job: Job) -> tuple[str, str]:
        return next((each.reason, each.sentence) for each in read_queue(ada).waiting if each.job.pk == job.pk)

    first, job, later = narrow(), join("home", "office", "office"), narrow()
    claim(office)
    assert said(job) == ("busy", "It runs on home and office at once, and waits for 1 device of office.")
    assert said(later) == ("busy", "The free devices of home are kept for a job ahead of it that needs 3 at once.")
    end(first)
    assert said(job)[0] == "next"
    go_away(office)
    assert said(job) == ("offline", "It runs on home and office at once; no worker of office takes jobs at present.")
    huge = said(join("home", "office", gib=9))
    assert huge[0] == "no_machine"
    assert huge[1] == (
        "It needs test processor of home with 9.00 GiB and test processor of office with 9.00 GiB; there is no such device."
    )
