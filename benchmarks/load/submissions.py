"""Offers taken by several connections at once, as many as the service takes and more."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from urllib.parse import urlparse

from benchmarks.common.record import Row
from benchmarks.load import rows
from benchmarks.load.client import LOST, REFUSALS, Answer, Asked
from benchmarks.load.service import Service

CREATED = 201
_GRACE_S = 120


def measure_submissions(service: Service, *, num_connections: int, seconds: float) -> Row:
    """Let so many connections submit for this long; the queue grows by what is taken."""
    address = urlparse(service.site.url)
    asked = Asked(
        host=str(address.hostname),
        port=int(address.port or 0),
        token=service.tokens[rows.MEMBER],
        body=service.submission,
        num_connections=num_connections,
        seconds=seconds,
    )
    num_queued = service.ask("num_queued")
    command = [sys.executable, "-m", "benchmarks.load.client"]
    done = subprocess.run(
        command,
        input=json.dumps(asdict(asked)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=seconds + _GRACE_S,
    )
    heard = json.loads(done.stdout)
    answers = [Answer(**answer) for answer in heard["answers"]]
    return {
        "num_connections": num_connections,
        "num_queued_before": num_queued,
        "load_average": round(os.getloadavg()[0], 2),
        **summarize(answers, seconds=heard["seconds"]),
    }


def summarize(answers: Sequence[Answer], *, seconds: float) -> Row:
    """Rates and times of what was taken and of what was refused, and how many faults there were."""
    taken = sorted(answer.ms for answer in answers if answer.status == CREATED)
    refused = [answer for answer in answers if answer.status in REFUSALS]
    refused_ms = sorted(answer.ms for answer in refused)
    statuses = Counter(answer.status for answer in answers)
    return {
        "taken_per_s": round(len(taken) / seconds, 1),
        "p50_ms": percentile(taken, 0.5),
        "p99_ms": percentile(taken, 0.99),
        "worst_ms": percentile(taken, 1.0),
        "num_refused": len(refused),
        "refused_p99_ms": percentile(refused_ms, 0.99),
        "num_without_retry_after": sum(answer.retry_after_s is None for answer in refused),
        "num_faults": sum(count for status, count in statuses.items() if status == LOST or is_fault(status)),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
    }


def is_fault(status: int) -> bool:
    """A failure of the service; 503 is a refusal."""
    return status >= 500 and status not in REFUSALS


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The measurement that this share of them does not pass; None without any."""
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else None
