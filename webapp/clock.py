"""Moments: by the database's clock, for conditions that several machines share, and as text in documents."""

from datetime import UTC, datetime, timedelta

from django.db.models import DateTimeField, ExpressionWrapper, Value
from django.db.models.expressions import Combinable
from django.db.models.functions import Now


def from_now(seconds: float) -> Combinable:
    """A moment ``seconds`` from now by the database's clock; negative for the past."""
    return ExpressionWrapper(Now() + Value(timedelta(seconds=seconds)), output_field=DateTimeField())


def iso(moment: datetime | None) -> str | None:
    """UTC with a Z, or None."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z") if moment else None
