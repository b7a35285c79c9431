"""``make demo``: a real model on real text inside a budget that plain training exceeds, checked against plain training.

Three jobs through the API of the running stack: the chosen plan inside the budget; the plain plan inside the same budget, which
must run out of memory; the plain plan with room, as the reference. Then every claim is checked on their measurements, and the
weights are loaded with transformers alone. Exit code 0 only if all claims hold.
"""

import copy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from headroom.client import HeadroomClient, Row
from headroom.client.types import Job
from headroom.commands.submit import connect, download_artifacts, follow_to_end, read_job_file, submit_job, verdict_of
from optimizer.base.errors import HeadroomError
from optimizer.base.units import TIB, format_bytes, format_duration
from worker.stack.home import PROGRAM_FOLDER, Stack

JOB_LIMIT_S = 900.0
"""No job of the demo takes half as long on two cores; without a worker it would wait for ever."""
LARGEST_BUDGET_SHARE = 0.60
SMALLEST_LOSS_DROP = 1.0
"""In nats of validation loss: from the uniform guess of an untrained model to well into the statistics of the text."""
FLOAT_NOISE = 5e-3
"""Between two validation losses whose sums were only taken in another order, over some hundred steps."""
LEAST_PARAMETERS = 10_000_000
LEAST_STEPS = 150
PROMPT = "In the beginning"


class DemoError(HeadroomError):
    """The demo cannot go on."""

    code = "demo_failed"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One thing the demo promises, and whether it was so."""

    text: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class DemoJobs:
    """The three jobs as they ended."""

    fitted: Job
    refused: Job
    plain: Job
    num_parameters: int


def main() -> int:
    console = Console()
    started_at = time.monotonic()
    try:
        with connect() as client:
            jobs = run_jobs(client, read_job_file(PROGRAM_FOLDER / "demo" / "job.yaml"), console=console)
            console.rule("What came of it")
            print_table(jobs, console=console)
            folder = fetch_model(client, jobs.fitted)
        claims = [*check_jobs(jobs), check_weights(folder, console=console)]
    except HeadroomError as error:
        console.print(f"demo: {error.message}" + (f"\n  {error.hint}" if error.hint else ""), style="bold red", markup=False)
        return 1
    for claim in claims:
        word, style = ("yes", "") if claim.holds else ("NO ", "bold red")
        console.print(f"{word}  {claim.text}", style=style, highlight=False, soft_wrap=True, markup=False)
    print_where_to_look(jobs, folder, url=client.url, console=console, seconds=time.monotonic() - started_at)
    return 0 if all(claim.holds for claim in claims) else 1


def run_jobs(client: HeadroomClient, spec: Row, *, console: Console) -> DemoJobs:
    spec.pop("plan", None)
    budget = format_bytes(spec["goal"]["device_budget_bytes"])
    console.rule(f"1 of 3: the plan chosen for {budget}")
    fitted = run_job(client, spec, label="chosen", name="kjv-demo", console=console)
    verdict_of(fitted)
    console.rule(f"2 of 3: plain training in the same {budget}; it must stop")
    refused = run_job(client, spec, label="keep_all", name="kjv-demo-plain-too-small", override=True, console=console)
    console.print(str(refused.get("message") or refused["state"]), style="italic", highlight=False, markup=False, soft_wrap=True)
    console.rule("3 of 3: plain training with all the room it wants, for comparison")
    roomy = copy.deepcopy(spec)
    roomy["goal"]["device_budget_bytes"] = TIB
    plain = run_job(client, roomy, label="keep_all", name="kjv-demo-plain", override=True, console=console)
    verdict_of(plain)
    model = next(row for row in client.models() if spec["model"] in (row["id"], row["name"]))
    return DemoJobs(fitted=fitted, refused=refused, plain=plain, num_parameters=int(model["num_parameters"] or 0))


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


def check_jobs(jobs: DemoJobs) -> list[Claim]:
    """Every claim about memory and loss, on measured numbers."""
    fitted, plain = jobs.fitted["summary"], jobs.plain["summary"]
    budget_bytes = int(jobs.fitted["spec"]["goal"]["device_budget_bytes"])
    peak_bytes, plain_bytes = int(fitted["device_peak_bytes"]), int(plain["device_peak_bytes"])
    drop = fitted["validation_loss_start"] - fitted["validation_loss"]
    return [
        Claim(
            text=f"{jobs.num_parameters / 1e6:.1f} M parameters trained for {jobs.fitted['step']} steps",
            holds=jobs.num_parameters >= LEAST_PARAMETERS and jobs.fitted["step"] >= LEAST_STEPS,
        ),
        Claim(
            text=f"measured peak {format_bytes(peak_bytes)} stayed within the budget of {format_bytes(budget_bytes)}",
            holds=peak_bytes <= budget_bytes,
        ),
        Claim(
            text=f"the budget is {percent(budget_bytes / plain_bytes)} of plain training's measured peak of "
            f"{format_bytes(plain_bytes)} (at most {percent(LARGEST_BUDGET_SHARE)})",
            holds=budget_bytes <= LARGEST_BUDGET_SHARE * plain_bytes,
        ),
        Claim(
            text=f"plain training in that budget ended {jobs.refused['state']}: {jobs.refused['reason'].replace('_', ' ')}",
            holds=(jobs.refused["state"], jobs.refused["reason"]) == ("failed", "out_of_device_memory"),
        ),
        Claim(
            text=f"validation loss fell from {fitted['validation_loss_start']:.3f} to {fitted['validation_loss']:.3f}",
            holds=drop >= SMALLEST_LOSS_DROP,
        ),
        check_equality(jobs),
    ]


def check_equality(jobs: DemoJobs) -> Claim:
    """Recomputing and offloading change no bit. Another micro-batch changes the order of sums, so there noise is allowed."""
    fitted, plain = jobs.fitted["summary"], jobs.plain["summary"]
    batches = [(job["plan"] or {}).get("batch") for job in (jobs.fitted, jobs.plain)]
    if batches[0] == batches[1]:
        same = bool(fitted["weights_sha256"]) and fitted["weights_sha256"] == plain["weights_sha256"]
        text = f"its weights {'equal' if same else 'differ from'} plain training's, bit for bit"
        return Claim(text=f"{text} (sha256 {fitted['weights_sha256'][:12]}…)", holds=same)
    difference = abs(fitted["validation_loss"] - plain["validation_loss"])
    return Claim(
        text=f"validation loss differs from plain training's by {difference:.1e}, float noise (at most {FLOAT_NOISE:g})",
        holds=difference <= FLOAT_NOISE,
    )


def print_table(jobs: DemoJobs, *, console: Console) -> None:
    rows: list[tuple[str, Callable[[Job], str]]] = [
        ("device peak, measured", lambda job: format_bytes(int(job["summary"]["device_peak_bytes"]))),
        ("device peak, predicted", lambda job: _predicted(job, "device_peak_bytes", lambda value: format_bytes(int(value)))),
        ("step time, measured", lambda job: f"{job['summary']['step_ms']:,.0f} ms"),
        ("step time, predicted", lambda job: _predicted(job, "step_ms", lambda value: f"{value:,.0f} ms")),
        ("validation loss, start", lambda job: f"{job['summary']['validation_loss_start']:.5f}"),
        ("validation loss, end", lambda job: f"{job['summary']['validation_loss']:.5f}"),
    ]
    console.print(f"{'':<24}{'in the budget':>22}{'plain':>22}", style="bold", highlight=False)
    for name, cell in rows:
        console.print(f"{name:<24}{cell(jobs.fitted):>22}{cell(jobs.plain):>22}", highlight=False)
    cost = jobs.fitted["summary"]["step_ms"] / jobs.plain["summary"]["step_ms"] - 1
    saved = 1 - jobs.fitted["summary"]["device_peak_bytes"] / jobs.plain["summary"]["device_peak_bytes"]
    console.print(f"{percent(saved)} less device memory for {percent(cost)} more time per step", highlight=False)


def _predicted(job: Job, key: str, write: Callable[[float], str]) -> str:
    """``212 MiB (-0.4 %)``: the prediction, and how far off it was."""
    predicted = (job.get("prediction") or {}).get(key)
    if not predicted:
        return "none"
    return f"{write(predicted)} ({percent(predicted / job['summary'][key] - 1, signed=True)})"


def fetch_model(client: HeadroomClient, job: Job) -> Path:
    """Download what the job left; the folder that transformers can load."""
    folder: Path = Stack.from_environment().home / "demo" / str(job["id"])
    download_artifacts(client, job["id"], folder=folder, say=lambda _: None)
    configs = sorted(folder.rglob("config.json"))
    if not configs:
        raise DemoError(f"{job['name']} left no config.json among its artifacts in {folder}")
    return configs[0].parent


def check_weights(folder: Path, *, console: Console) -> Claim:
    """In a fresh process, with transformers and nothing of ours."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM_FOLDER / "demo" / "generate.py"), str(folder), PROMPT],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    written = done.stdout.strip()
    if done.returncode == 0 and len(written) > len(PROMPT):
        console.print(f"it writes: {' '.join(written.split())}", style="italic", highlight=False, markup=False, soft_wrap=True)
        return Claim(text="the exported folder loads with AutoModelForCausalLM.from_pretrained and generates", holds=True)
    reason: Sequence[str] = (done.stderr.strip() or "it wrote nothing").splitlines()
    return Claim(text=f"the exported folder does not load and generate: {reason[-1]}", holds=False)


def print_where_to_look(jobs: DemoJobs, folder: Path, *, url: str, console: Console, seconds: float) -> None:
    lines = [
        f"done in {format_duration(seconds)}; the service stays up at {url} (make down stops it)",
        f"  the run         {url}/jobs/{jobs.fitted['id']}/",
        f"  plain training  {url}/jobs/{jobs.plain['id']}/",
        f"  the weights     {folder}",
        "  once more       .venv/bin/headroom submit demo/job.yaml --follow",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def percent(share: float, *, signed: bool = False) -> str:
    return f"{100 * share:+.1f} %" if signed else f"{100 * share:.0f} %"


if __name__ == "__main__":
    sys.exit(main())
