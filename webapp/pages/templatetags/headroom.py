"""Writes numbers, times and states on every page: rounded for reading, exact on hover.

Nothing here reads the database; ``webapp/pages/presentation.py`` shapes what these write.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django import template
from django.forms import BaseForm
from django.utils.html import format_html
from django.utils.safestring import SafeString

from optimizer.base.categories import CATEGORY_LABELS
from optimizer.base.units import format_bytes, format_duration
from optimizer.hardware.rental import Cost
from webapp.jobs.devices.joined import machine_words
from webapp.jobs.specs.joining import link_words
from webapp.pages.forms.options import count_words
from webapp.pages.forms.work import form_query
from webapp.pages.presentation import clock_words, step_words
from webapp.pages.words.baselines import BASELINE_WORDS

register = template.Library()

NONE_YET = "–"
_MISSING = (None, "")
"""A template passes an empty string for a key that a document does not have."""


@register.simple_tag
def size(num_bytes: Any) -> str | SafeString:
    """Three significant figures; the exact number of bytes on hover."""
    if num_bytes in _MISSING:
        return NONE_YET
    return format_html('<span class="num" title="{} bytes">{}</span>', f"{num_bytes:,}", format_bytes(num_bytes))


@register.simple_tag
def parameters(num_parameters: int | None) -> str | SafeString:
    """``8.03 B``; the exact number on hover."""
    if not num_parameters:
        return NONE_YET
    short = count_words(num_parameters).removesuffix(" parameters")
    return format_html('<span class="num" title="{}">{}</span>', f"{num_parameters:,}", short)


@register.filter(name="bytes")
def bytes_words(num_bytes: Any) -> str:
    """The text of ``size``, for attributes."""
    return NONE_YET if num_bytes in _MISSING else format_bytes(num_bytes)


@register.simple_tag
def moment(when: datetime | None) -> str | SafeString:
    """A point in time: the clock today, the day otherwise; ISO 8601 UTC on hover."""
    if not when:
        return NONE_YET
    short = clock_words(when)
    iso = when.strftime("%Y-%m-%dT%H:%M:%SZ")
    return format_html('<time class="num" datetime="{}" title="{}">{}</time>', iso, iso, short)


register.filter(machine_words)
register.filter(link_words)


@register.filter
def duration(seconds: Any) -> str:
    return NONE_YET if seconds in _MISSING else format_duration(seconds)


@register.filter
def milliseconds(value: Any) -> str:
    """A step time as people read it."""
    return NONE_YET if value in _MISSING else step_words(value)


@register.simple_tag
def outcome_value(value: float | None, unit: str) -> str | SafeString:
    """One number of a run, as its unit is read (``webapp.planning.runs.comparing.Unit``)."""
    if value is None:
        return NONE_YET
    if unit == "bytes":
        return size(int(value))
    writers = {"ms": milliseconds, "s": duration, "per_s": count}
    return format_html('<span class="num">{}</span>', writers.get(unit, figure)(value))


@register.simple_tag
def change(value: float, unit: str) -> str | SafeString:
    """A difference with its sign; what is nothing is said to be none."""
    magnitude = abs(int(value)) if unit == "bytes" else abs(value)
    if magnitude < {"bytes": 1, "per_s": 0.5}.get(unit, 0.05):
        return "none"
    return format_html("{}{}", "+" if value > 0 else "−", outcome_value(magnitude, unit))


@register.filter
def setting_name(path: str) -> str:
    """``goal.device_budget_bytes`` as ``device budget``, ``workload.num_steps`` as ``steps``."""
    return words(path.rpartition(".")[2].removesuffix("_bytes").removeprefix("num_"))


@register.simple_tag
def setting_value(name: str, value: Any) -> str | SafeString:
    """One field of a job's spec: sizes as people read them, lists by their items."""
    if value is None:
        return "none"
    if name.endswith("_bytes") and isinstance(value, int):
        return size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


@register.simple_tag
def form_address(form: BaseForm, changes: dict[str, str] | None = None) -> str:
    """The form with some fields changed, as a query string."""
    return form_query(form, changes)


@register.filter
def rented(costs: Sequence[Cost]) -> Cost | None:
    """The part of a run's costs that rents the card."""
    return next((cost for cost in costs if cost.kind == "rented"), None)


@register.simple_tag
def money(cost: Cost) -> str:
    """The cost of a million tokens."""
    return f"{cost.currency} {cost.per_million_tokens:,.3g}"


@register.filter
def percent(share: float) -> str:
    return f"{100 * share:.2g} %"


@register.filter
def as_json(document: Any) -> str:
    """For a data attribute that a script reads."""
    return json.dumps(document)


@register.filter
def count(value: Any) -> str:
    """Whole numbers with thousands separators."""
    return NONE_YET if value in _MISSING else f"{value:,.0f}"


@register.filter
def figure(value: Any) -> str:
    """A loss or a rate: four significant figures, no exponent where people would write none."""
    if value in _MISSING:
        return NONE_YET
    return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


@register.filter
def words(code: Any) -> str:
    """``does_not_fit`` as ``does not fit``."""
    return str(code).replace("_", " ")


@register.filter
def baseline_words(label: str) -> str:
    """A few words on a plan written by hand; empty for any other."""
    return BASELINE_WORDS.get(label, "")


@register.filter
def category_label(category: str) -> str:
    return CATEGORY_LABELS.get(category, words(category))  # type: ignore[call-overload, no-any-return]


@register.filter
def short_hash(digest: str) -> str:
    return digest[:12]
