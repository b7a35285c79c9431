"""The web process on an empty home, with a model, a data set, a machine and an offer that may be taken again and again.

No worker runs: what is submitted stays queued. Limits on one person's requests and queue are raised, not lifted, so that they are
still counted.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.load import rows
from optimizer.base.errors import HeadroomError
from tests import llama
from tests.end_to_end.site.site import Site

NO_LIMIT = "1000000"
LIMITS = ("HEADROOM_MAX_QUEUED_PER_PERSON", "HEADROOM_MAX_QUEUED_PER_PROJECT", "HEADROOM_MAX_REQUESTS_PER_MINUTE")


@dataclass(frozen=True, kw_only=True)
class Service:
    """The running service, who may ask it, and what to ask."""

    site: Site
    tokens: dict[str, str]
    """By the person's name."""
    model: str
    """The id of the one whose profile is known."""
    submission: str
    """The body that takes the offer."""

    def ask(self, command: str, /, **arguments: Any) -> Any:
        """One command of ``rows.py`` and its answer."""
        return self.site.ask(command, **arguments)

    def api(self, person: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.tokens[person]}"}
        return httpx.Client(base_url=self.site.url, headers=headers, timeout=60, trust_env=False)

    def browser(self, person: str) -> httpx.Client:
        """A client with the cookies of a log-in through the form."""
        client = httpx.Client(base_url=self.site.url, timeout=60, trust_env=False)
        client.get("/login/")
        form = {"username": person, "password": rows.PASSWORD, "csrfmiddlewaretoken": client.cookies["csrftoken"]}
        answer = client.post("/login/", data=form, headers={"Referer": self.site.url})
        if answer.status_code != httpx.codes.FOUND:
            raise HeadroomError(f"{person} was not logged in: the form answered {answer.status_code}, expected 302")
        return client


@contextmanager
def running_service(*, database_url: str | None) -> Iterator[Service]:
    """database_url: None for SQLite in the service's home."""
    environment = dict.fromkeys(LIMITS, NO_LIMIT) | ({"DATABASE_URL": database_url} if database_url else {})
    site = Site(control="benchmarks.load.rows", **environment)
    try:
        site.ask("seed")
        model = _add_model(site)
        tokens = site.ask("add_people")
        submission = _make_offer(site, tokens[rows.MEMBER], model)
        yield Service(site=site, tokens=tokens, model=model, submission=submission)
    except BaseException:
        print(site.log(), file=sys.stderr)
        raise
    finally:
        site.close()


def _add_model(site: Site) -> str:
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "profile.json")
        Path(folder, "config.json").write_text(json.dumps(llama.CONFIG))
        command = [sys.executable, "-m", "optimizer.cli", "profile", "--model", folder, "-o", str(profile)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        model: str = site.ask("add_llama", profile_file=str(profile))
    return model


def _make_offer(site: Site, token: str, model: str) -> str:
    """The body of a submission that takes the chosen offer; one job is submitted with it, and is the first in the queue."""
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=f"{site.url}/api/v1", headers=headers, timeout=120, trust_env=False) as api:
        dataset = api.get("/datasets").raise_for_status().json()["results"][0]
        spec = {
            "name": "load",
            "model": model,
            "dataset": dataset["id"],
            "workload": {"sequence_length": 64, "global_batch_size": 4, "num_steps": 10},
            "goal": {"device_budget_bytes": "200 MiB"},
        }
        answer = api.post("/plans", json=spec).raise_for_status().json()
        offer = next(offer for offer in answer["offers"] if offer["chosen"])
        body = json.dumps({"spec": spec, "plan_id": offer["id"]})
        api.post("/jobs", content=body, headers={"Content-Type": "application/json"}).raise_for_status()
    return body
