"""Jobs as people name them: by id, by the last characters of an id, or by name."""

import argparse
import re

from headroom.client import HeadroomClient
from headroom.commands.submit import UsageError

JOB_HELP = "name of a job, its id, or the last characters of the id"
_END_OF_ID = re.compile(r"[0-9a-f]{6,}")
"""Ids made in the same minute begin alike; their ends are random."""
_MOST = 200
"""Newest jobs that are looked through."""


def resolve_jobs(client: HeadroomClient, options: argparse.Namespace) -> None:
    """Put ids in the place of what was given for ``job`` or ``jobs``. Raises UsageError."""
    if isinstance(given := getattr(options, "job", None), str):
        options.job = find_job(client, given)
    if given_jobs := getattr(options, "jobs", None):
        options.jobs = [find_job(client, each) for each in given_jobs]


def find_job(client: HeadroomClient, text: str) -> str:
    """The id of a job. Raises UsageError where none, or more than one, is meant."""
    if text.startswith("job_"):
        return text
    named = [job for job in client.jobs(text=text, limit=_MOST) if job["name"] == text]
    if not named and _END_OF_ID.fullmatch(text):
        named = [job for job in client.jobs(limit=_MOST) if job["id"].endswith(text)]
    if not named:
        raise UsageError(f'no job "{text}" in your projects', hint="Their names and ids: headroom list")
    if len(named) > 1:
        ends = ", ".join(f"{job['id'][-8:]} ({job['state']})" for job in named[:5])
        raise UsageError(f'{len(named)} jobs are named "{text}": {ends}', hint="Give the last characters of an id instead.")
    return named[0]["id"]
