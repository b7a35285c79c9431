"""Words for people about a job's move, as a mail or a message in a channel says them."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.conf import settings

from optimizer.base.units import format_bytes, format_duration

ENDINGS = ("job.succeeded", "job.failed", "job.cancelled")
"""The events that people hear of who asked for none by name."""
_VERBS = {
    "job.created": "is waiting",
    "job.started": "has started",
    "job.requeued": "waits again",
    "job.paused": "is paused",
    "job.resumed": "goes on",
    "job.succeeded": "succeeded",
    "job.failed": "failed",
    "job.cancelled": "was stopped",
}


def write_notice(event: str, data: Mapping[str, Any]) -> tuple[str, str]:
    """A subject, and a text that begins with the same and ends with the job's address where that is known.

    data: the job as ``state_document`` gives it, with ``predicted_peak_bytes`` where there is a prediction.
    """
    if event not in _VERBS:
        return "A test of Headroom's notices", str(data.get("text") or "A test.")
    subject = _plain(f"{data['name']} {_VERBS[event]}")
    sentence = f"{subject}{_after(data) if event in ENDINGS else ''}."
    facts = [sentence, *_facts(data)] if event in ENDINGS else [sentence]
    address = settings.HEADROOM_PUBLIC_URL
    link = [f"{address.rstrip('/')}/jobs/{data['id']}/"] if address else []
    return subject, "\n".join([" ".join(facts), *link])


def escape_for_channel(text: str) -> str:
    """Slack's three control characters as entities: a job named ``<!channel>`` must call nobody and hide no address."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _after(data: Mapping[str, Any]) -> str:
    begun, ended = data.get("started_at"), data.get("finished_at")
    if not begun or not ended:
        return ""
    seconds = (datetime.fromisoformat(ended) - datetime.fromisoformat(begun)).total_seconds()
    return f" after {format_duration(max(0.0, seconds))}"


def _facts(data: Mapping[str, Any]) -> list[str]:
    """Sentences: the reason, how far it came, and the peak beside its prediction."""
    summary, found = data.get("summary") or {}, []
    if data.get("message"):
        found.append(_plain(str(data["message"])).rstrip(".") + ".")
    loss = summary.get("validation_loss") or summary.get("loss")
    if data.get("num_steps"):
        at = f", loss {loss:.3f}" if isinstance(loss, int | float) else ""
        found.append(f"Step {data['step']:,} of {data['num_steps']:,}{at}.")
    peak, predicted = summary.get("device_peak_bytes"), data.get("predicted_peak_bytes")
    if peak:
        beside = f", predicted {format_bytes(int(predicted))}" if predicted else ""
        found.append(f"Peak {format_bytes(int(peak))} of device memory{beside}.")
    return found


def _plain(text: str) -> str:
    """One line, whatever a job is called."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:300]
