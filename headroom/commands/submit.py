"""From a job file to a finished job, through the API: what ``headroom submit`` and the demo have in common."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console

from headroom.client import ApiProblem, HeadroomClient, Row
from headroom.client.types import Dataset, Job, Offer
from headroom.commands.terminal import JobView, watch
from optimizer.base.errors import HeadroomError
from optimizer.base.units import format_bytes, parse_bytes
from worker.stack import stack
from worker.stack.home import Stack

DATASET_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")
SHOWN_LINES = 10
"""Unusable lines of a file of prompts that are named, the first of them."""


class UsageError(HeadroomError):
    """The command or a file it names cannot be understood."""

    code = "usage"


class JobFailed(HeadroomError):
    """A followed job ended otherwise than succeeded."""

    code = "job_failed"


def connect(*, url: str | None = None, token: str | None = None, project: str | None = None) -> HeadroomClient:
    """Address and token as given, from the environment, or the local stack's own file, in this order."""
    local = Stack.from_environment()
    try:
        known: Row = json.loads(local.credentials_file.read_text())
    except (FileNotFoundError, ValueError):
        known = {}
    running = stack.find_running(local) or {}
    given_url = url or os.environ.get("HEADROOM_URL")
    token = token or os.environ.get("HEADROOM_TOKEN") or ("" if given_url else known.get("token", ""))
    if not token:
        raise UsageError(
            "no API token is known" + (f" for {given_url}" if given_url else ""),
            hint="Give --token or HEADROOM_TOKEN, or start a local service with: headroom up",
        )
    if not (token.isascii() and token.isprintable()):
        raise UsageError("the API token holds characters that no token has", hint="Tokens are made on the page Tokens.")
    address = str(given_url or running.get("url") or known.get("url") or local.url)
    try:
        return HeadroomClient(address, token=token, project=project or os.environ.get("HEADROOM_PROJECT") or "")
    except httpx.InvalidURL as error:
        raise UsageError(f"{address} is not an address: {error}", hint=f"Give one such as {local.url}") from error


def read_job_file(file: Path) -> Row:
    """A job spec from YAML: sizes may be written as people do (``360 MiB``), paths are relative to the file."""
    try:
        document = yaml.safe_load(file.read_text())
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{file} is not a job: expected names with values, such as model, dataset, workload, goal")
    workload, goal = document.get("workload"), document.get("goal")
    if isinstance(workload, dict):
        document["workload"] = _numbers_as_written(workload)
    for name in ("device_budget_bytes", "host_budget_bytes", "disk_budget_bytes"):
        if isinstance(goal, dict) and isinstance(goal.get(name), str):
            try:
                goal[name] = parse_bytes(goal[name])
            except ValueError as error:
                raise UsageError(f"{file}: goal.{name}: {error}") from error
    return document


def _numbers_as_written(document: Row) -> Row:
    """Also of what is nested in it: a workload's adapters."""
    return {
        name: _numbers_as_written(value) if isinstance(value, dict) else _number_as_written(value)
        for name, value in document.items()
    }


def _number_as_written(value: Any) -> Any:
    """``1e-3`` is a number to everyone but YAML 1.1, which wants a dot in it."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]+", value):
        return float(value)
    return value


def upload_named_files(client: HeadroomClient, spec: Row, *, folder: Path) -> Row:
    """Link or upload what is a folder or file on this machine (``model``, ``dataset``, ``prompts``); put its id there."""
    made = dict(spec)
    model, dataset = made.get("model"), made.get("dataset")
    if isinstance(model, str) and (folder / model).is_dir():
        made["model"] = client.add_model(folder / model, name=(folder / model).resolve().name)[0]["id"]
    if isinstance(dataset, str) and dataset.endswith(DATASET_SUFFIXES) and (folder / dataset).is_file():
        made["dataset"] = client.create_dataset(folder / dataset, name=Path(dataset).stem)["id"]
    prompts = made.get("prompts")
    if isinstance(prompts, str) and prompts.endswith(".jsonl") and (folder / prompts).is_file():
        made["prompts"] = add_prompts(client, folder / prompts)["id"]
    return made


def add_prompts(client: HeadroomClient, path: Path) -> Dataset:
    """Upload a file of prompts, and name its lines that get no answer."""
    dataset = client.create_dataset(path, name=path.stem, purpose="prompts")
    name_unusable_lines(dataset)
    return dataset


def name_unusable_lines(dataset: Dataset) -> None:
    """The first of them, each with the reason, to standard error."""
    num_refused = dataset["facts"].get("num_refused") or 0
    if not num_refused:
        return
    print(f"{num_refused:,} of {dataset['num_documents']:,} lines cannot be used and get no answer:", file=sys.stderr)
    named = dataset["facts"]["problems"][:SHOWN_LINES]
    for problem in named:
        print(f"  line {problem['line']}: {problem['message']}", file=sys.stderr)
    if num_refused > len(named):
        print(f"  and {num_refused - len(named):,} more", file=sys.stderr)


def submit_job(client: HeadroomClient, spec: Row, *, label: str, override: bool, say: Callable[[str], None]) -> Job:
    """Price the spec, take the offer of that label (``chosen``, or a baseline's name), create the job."""
    try:
        offers = client.price_plans(
            spec, on_wait=_once(lambda: say("profiling the model, which is done once")), on_remark=say
        )
    except ApiProblem as error:
        offers = error.extra.get("offers") or []
        if label == "chosen" or not offers:
            raise
    offer = pick_offer(offers, label=label)
    return client.create_job(spec, plan_id=offer["id"], override=override)


def pick_offer(offers: Sequence[Offer], *, label: str) -> Offer:
    for offer in offers:
        if offer.get("label") == label or (label == "chosen" and offer.get("chosen")):
            return offer
    known = ", ".join(str(offer.get("label")) for offer in offers)
    raise UsageError(f"no plan is called {label!r}; there are: {known or 'none'}")


def follow_to_end(client: HeadroomClient, job: Job, *, console: Console) -> Job:
    """Draw the job until it has ended; the job as it is then."""
    watch(JobView(job=dict(job)), client.follow_job(job["id"]), console=console)
    return client.job(job["id"])


def verdict_of(job: Job) -> None:
    """Raise JobFailed with the job's own sentence unless it succeeded."""
    if job["state"] == "succeeded":
        return
    hint = str((job.get("error") or {}).get("hint") or "")
    reason = str(job.get("reason") or "").replace("_", " ")
    raise JobFailed(f"{job['name']} {job['state']}: {job.get('message') or reason or 'no reason given'}", hint=hint)


def download_artifacts(client: HeadroomClient, job_id: str, *, folder: Path, say: Callable[[str], None]) -> None:
    """Every artifact below ``folder``: the model, its adapters and a GGUF file in folders of their own."""
    artifacts = client.artifacts(job_id)
    if not artifacts:
        say("the job has left no files")
    for artifact in artifacts:
        file = folder / artifact["path"]
        if not file.resolve().is_relative_to(folder.resolve()):
            raise HeadroomError(f"the artifact {artifact['name']!r} would be written outside {folder}")
        file.parent.mkdir(parents=True, exist_ok=True)
        client.download_artifact(artifact["id"], file=file)
        say(f"{file}  {format_bytes(artifact['num_bytes'])}")


def _once(call: Callable[[], None]) -> Callable[[], None]:
    called = False

    def first_time_only() -> None:
        nonlocal called
        if not called:
            called = True
            call()

    return first_time_only
