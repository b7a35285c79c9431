"""Makes what the benchmark needs from inside the service: people and their tokens, a long queue, the addresses of the pages.

``python -m benchmarks.load.rows``: one JSON line ``[command, arguments]`` in, one JSON line out, on the service's own database.
The commands of the tests' sites (``seed``, ``add_llama``) are answered too.
"""

from tests.end_to_end.site.site_control import add_llama as add_llama
from tests.end_to_end.site.site_control import answer_commands
from tests.end_to_end.site.site_control import seed as seed

PASSWORD = "correct horse battery"
MEMBER, ADMINISTRATOR = "ada", "grace"
_ROWS_AT_ONCE = 1000


def add_people() -> dict[str, str]:
    """A token of the member whom ``seed`` made, and one of an administrator; each may do what its owner may."""
    from django.contrib.auth.models import User

    from tests.webapp.pages import rows
    from webapp.accounts.models import Scope
    from webapp.accounts.tokens import create_token

    rows.make_user(ADMINISTRATOR, is_admin=True)
    people = {name: User.objects.get(username=name) for name in (MEMBER, ADMINISTRATOR)}
    return {name: create_token(user=user, name="load", scope=Scope.ADMIN)[1] for name, user in people.items()}


def num_queued() -> int:
    from webapp.jobs.models import Job

    return Job.objects.filter(state="queued").count()


def fill_queue(*, num_jobs: int) -> int:
    """Add copies of the newest job until so many are queued; a copy has no rows of events. Returns how many are queued."""
    from django.db.models import Max

    from webapp.jobs.models import Job

    newest = Job.objects.latest("created_at")
    shared = (
        "owner", "project", "kind", "model", "dataset", "spec", "plan", "prediction", "machine", "num_steps",
        "need_device_kind", "need_device_bytes", "need_devices", "event_seq",
    )  # fmt: skip
    values = {name: getattr(newest, name) for name in shared}
    turn = Job.objects.aggregate(last=Max("turn"))["last"] + 1
    copies = [Job(name=f"queued-{index}", turn=turn + index, **values) for index in range(num_jobs - num_queued())]
    Job.objects.bulk_create(copies, batch_size=_ROWS_AT_ONCE)
    return num_queued()


def list_pages() -> list[str]:
    """Addresses of all pages as the router has them: ``/jobs/<slug:job_id>/``."""
    from webapp.pages.urls import urlpatterns

    return [f"/{route.pattern}" for route in urlpatterns]


if __name__ == "__main__":
    answer_commands(globals())
