"""Out of memory or of disk at an attempt's end, and first steps that missed their prediction: whether the job goes on under
another plan.

The next plan is found later and elsewhere (``webapp/planning/replanning.py``): a search takes longer than a transaction may.
Other ends are decided in ``outcome.py``.
"""

from typing import Any

from optimizer.base.serialize import from_json
from optimizer.estimate.job.causes import describe_cause
from optimizer.goal import Goal
from webapp.jobs.documents import describe_shortages, fills_disk
from webapp.jobs.models import MEMORY_REASONS, PROBED, Attempt, Job, Kind, Reason

MAX_REPLANS = 3
"""A job that runs out of memory under so many further plans ends: something is wrong that no plan mends."""


def count_shortages(attempt: Attempt) -> int:
    """Attempts of the job before this one that ran out of memory."""
    return Attempt.objects.filter(job_id=attempt.job_id, number__lt=attempt.number, outcome__in=MEMORY_REASONS).count()


def may_replan(job: Job, reason: str, *, num_before: int) -> bool:
    """Report whether the job goes on under another plan. num_before: attempts before that ran out."""
    return reason in MEMORY_REASONS and num_before < MAX_REPLANS and _can_replan(job)


def may_take_less_disk(job: Job, result: dict[str, Any]) -> bool:
    """Report whether another plan, with less in its scratch file, may go on where the disk was full."""
    is_full = result.get("reason") == Reason.DISK_FULL and fills_disk(result.get("error"), job.prediction)
    return is_full and _can_replan(job)


def _can_replan(job: Job) -> bool:
    """A job without a prediction has nothing that a search could mend."""
    if job.plan is None or job.prediction is None:
        return False
    if job.kind == Kind.GENERATE:
        return bool(job.spec.get("plan") == "chosen")
    return job.kind == Kind.TRAIN and from_json(Goal, job.spec["goal"], path="goal").replans(job.spec.get("plan", ""))


def may_probe(attempt: Attempt) -> bool:
    """Report whether the attempt's first steps are held against the prediction: once in a job, where its plan may change, its
    devices are alike, and no other job on the device makes them slower.
    """
    job = attempt.job
    if attempt.is_shared or job.need_ranks or job.kind != Kind.TRAIN or not _can_replan(job):
        return False
    return not job.attempts.filter(outcome=PROBED).exists()


def was_killed(job: Job, result: dict[str, Any] | None) -> bool:
    """Report whether the host's killer ended an attempt of a job that keeps its plan, or whose plan keeps nothing on the host:
    others may have filled it, so the same is tried again later, as after a lost worker.
    """
    fields = ((result or {}).get("error") or {}).get("fields") or {}
    return fields.get("cause") == "host_killed" and not (_can_replan(job) and _is_on_host(job))


def _is_on_host(job: Job) -> bool:
    """Report whether steps or passes have anything in the host's memory, as all have on the CPU device."""
    on_cpu = job.machine is not None and job.machine.document["device"]["kind"] == "cpu"
    return on_cpu or bool((job.prediction or {}).get("host_peak_bytes"))


def describe_shortage(result: dict[str, Any], *, num_before: int) -> str:
    """One sentence: what ran out, why, and that another plan is looked for."""
    fields = (result.get("error") or {}).get("fields") or {}
    why = describe_cause(str(fields.get("cause", "")), stage=str(fields.get("stage", "")))
    what = str(result.get("message") or "memory ran out")
    return f"{what}{f' ({why})' if why else ''}; another plan is looked for, number {num_before + 1} of at most {MAX_REPLANS}"


def describe_last_shortage(attempt: Attempt, message: str) -> str:
    """The message of a job that ends with this attempt: every attempt that ran out of memory, where there were others before."""
    before = describe_shortages(attempt.job)
    return "; ".join([*before, f"attempt {attempt.number}: {message}"]) if before else message
