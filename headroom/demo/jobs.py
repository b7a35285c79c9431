"""The runs of ``make demo``, through the API of the running stack."""

import copy
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from headroom.client import HeadroomClient, Row
from headroom.client.types import Job
from headroom.commands.submit import download_artifacts, follow_to_end, read_job_file, submit_job, verdict_of
from optimizer.base.errors import HeadroomError
from optimizer.base.units import TIB, format_bytes, format_duration
from worker.stack.home import PROGRAM_FOLDER, Stack

JOB_LIMIT_S = 900.0
"""No job of the demo takes half as long on two cores; without a worker it would wait for ever."""
EXACT_STEPS = 20
"""Enough for any wrong bit to have spread to every weight."""


class DemoError(HeadroomError):
    """The demo cannot go on."""

    code = "demo_failed"


@dataclass(frozen=True, kw_only=True)
class ChatJobs:
    """A LoRA of a chat model inside a budget, and the same with no memory saved, which that budget must stop."""

    tuned: Job
    refused: Job


@dataclass(frozen=True, kw_only=True)
class ExactJobs:
    """The same steps under a budget and without one."""

    fitted: Job
    plain: Job
    num_parameters: int


def read_demo_file(name: str) -> Row:
    spec = read_job_file(PROGRAM_FOLDER / "demo" / name)
    spec.pop("plan", None)
    return spec


def fine_tune(client: HeadroomClient, *, console: Console) -> ChatJobs:
    spec = read_demo_file("chat.yaml")
    budget = format_bytes(spec["goal"]["device_budget_bytes"])
    console.rule(f"2 of 4: LoRA on it inside {budget}, with the plan chosen for that")
    tuned = run_job(client, spec, label="chosen", name="chat-demo", console=console)
    verdict_of(tuned)
    console.rule(f"3 of 4: the same in {budget} with no memory saved; it must stop")
    refused = run_job(client, spec, label="keep_all", name="chat-demo-plain-too-small", override=True, console=console)
    console.print(str(refused.get("message") or refused["state"]), style="italic", highlight=False, markup=False, soft_wrap=True)
    return ChatJobs(tuned=tuned, refused=refused)


def train_exactly(client: HeadroomClient, *, console: Console) -> ExactJobs:
    spec = read_demo_file("job.yaml")
    spec["workload"] |= {"num_steps": EXACT_STEPS, "eval_every_steps": EXACT_STEPS, "checkpoint_every_steps": EXACT_STEPS}
    budget = format_bytes(spec["goal"]["device_budget_bytes"])
    console.rule(f"4 of 4: {EXACT_STEPS} steps of exact training inside {budget}, and with all the room it wants")
    fitted = run_job(client, spec, label="chosen", name="exact-demo", console=console)
    verdict_of(fitted)
    roomy = copy.deepcopy(spec)
    roomy["goal"]["device_budget_bytes"] = TIB
    plain = run_job(client, roomy, label="keep_all", name="exact-demo-plain", override=True, console=console)
    verdict_of(plain)
    model = next(row for row in client.models() if spec["model"] in (row["id"], row["name"]))
    return ExactJobs(fitted=fitted, plain=plain, num_parameters=int(model["num_parameters"] or 0))


def run_job(
    client: HeadroomClient, spec: Row, *, label: str, name: str, console: Console, override: bool = False
) -> Job:
    """Submit one plan of the spec and follow it to its end, whatever that is."""
    with time_limit(JOB_LIMIT_S, what=name):
        job = submit_job(client, {**spec, "name": name}, label=label, override=override, say=console.print)
        console.print(f"watch it in the browser: {client.url}/jobs/{job['id']}/", highlight=False, soft_wrap=True)
        return follow_to_end(client, job, console=console)


@contextmanager
def time_limit(seconds: float, *, what: str) -> Iterator[None]:
    """Raise DemoError in the main thread when the block takes longer."""

    def too_long(*_: object) -> None:
        raise DemoError(f"{what} has not ended within {format_duration(seconds)}", hint="See: make status, and the logs it names")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fetch_files(client: HeadroomClient, job: Job) -> Path:
    """Download what the job left, its model in ``model/`` and its adapter in ``adapter/`` of the folder."""
    folder: Path = Stack.from_environment().home / "demo" / str(job["id"])
    download_artifacts(client, job["id"], folder=folder, say=lambda _: None)
    for name in ("model/config.json", "adapter/adapter_config.json"):
        if not (folder / name).is_file():
            raise DemoError(f"{job['name']} left no {name} among its artifacts in {folder}")
    return folder
