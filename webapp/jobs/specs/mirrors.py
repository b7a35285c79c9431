"""Reads ``mirrors`` of a job spec: services outside of Headroom that the run's measurements are copied to."""

from typing import Any

from django.conf import settings

from optimizer.base.errors import InvalidInput
from optimizer.base.shown import shown_value

FIELD = "mirrors"
TITLES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
"""Those there are, as people call them."""


def open_mirrors() -> tuple[str, ...]:
    """Those that an administrator has opened, in one order."""
    return tuple(name for name in TITLES if name in settings.HEADROOM_MIRRORS)


def read_mirrors(given: Any) -> tuple[str, ...]:
    """Names of mirrors, none unless given. Raises InvalidInput."""
    if given is None:
        return ()
    is_list = isinstance(given, list | tuple) and all(isinstance(name, str) for name in given)
    allowed = open_mirrors()
    wrong = next((name for name in given if name not in allowed), None) if is_list else given
    if not is_list or wrong is not None:
        raise InvalidInput(
            f"{FIELD} holds {wrong!r:.80}; allowed: {_listed(allowed)}",
            field=FIELD,
            value=shown_value(wrong),
            allowed=list(allowed),
            hint="An administrator opens mirrors by HEADROOM_MIRRORS.",
        )
    return tuple(name for name in allowed if name in given)


def mirrors_document(mirrors: tuple[str, ...]) -> dict[str, Any]:
    """The part of a normalized spec."""
    return {FIELD: list(mirrors)} if mirrors else {}


def _listed(allowed: tuple[str, ...]) -> str:
    return f"a list of {', '.join(allowed)}" if allowed else "none, because none has been opened here"
