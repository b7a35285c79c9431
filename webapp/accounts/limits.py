"""Limits by person and by project, from the settings. They stop what ran wild, such as a loop that submits; 0 lifts one."""

import time
from collections.abc import Callable
from typing import Any

from django.conf import settings

from webapp.accounts.errors import LimitReached
from webapp.wire.counting import count_in_minute, seconds_left

QUEUE_AGAIN_S = 30
"""Retry-After where jobs must start or be cancelled first."""
_MOST_PER_S = 20_000
"""No service takes so many submissions: it is far above what a database of the largest machine commits."""
_room_until_s: dict[tuple[str, int, str], float] = {}
"""By setting, its value and whose jobs: until then the limit cannot be reached, by this process's clock."""


def check_request_rate(user: Any) -> None:
    """Counts one request to the API. Raises LimitReached."""
    allowed = settings.HEADROOM_MAX_REQUESTS_PER_MINUTE
    if allowed and count_in_minute(f"requests:{user.pk}") > allowed:
        raise LimitReached(
            f"you have sent {allowed:,} requests to the API in this minute; allowed: at most that",
            hint="Wait for the seconds in Retry-After; the limit is HEADROOM_MAX_REQUESTS_PER_MINUTE.",
            limit="HEADROOM_MAX_REQUESTS_PER_MINUTE",
            retry_after_s=seconds_left(),
        )


def check_project_rate(project_id: str) -> None:
    """Counts one request to the API for the project that it names or works in. Raises LimitReached."""
    setting = "HEADROOM_MAX_REQUESTS_PER_MINUTE_PER_PROJECT"
    allowed = getattr(settings, setting)
    if allowed and count_in_minute(f"project-requests:{project_id}") > allowed:
        raise LimitReached(
            f"this project's people have sent {allowed:,} requests to the API in this minute; allowed: at most that",
            hint=f"Wait for the seconds in Retry-After; the limit is {setting}.",
            limit=setting,
            retry_after_s=seconds_left(),
        )


def check_queue_room(whose: str, count_waiting: Callable[[], int], *, setting: str, key: str) -> None:
    """Raises LimitReached where no further job may wait. whose: ``you have`` or ``project NAME has``.

    Twenty thousand rows take longer to count than a job to make. So a count is asked for again only once so many jobs may have
    come, over all processes together, that the limit could be reached; close to it that is with each submission.
    """
    allowed = getattr(settings, setting)
    if not allowed or time.monotonic() < _room_until_s.get((setting, allowed, key), 0.0):
        return
    counted_at_s = time.monotonic()
    num_waiting = count_waiting()
    _room_until_s[setting, allowed, key] = counted_at_s + (allowed - num_waiting) / _MOST_PER_S
    if num_waiting >= allowed:
        raise LimitReached(
            f"{whose} {num_waiting:,} jobs that wait; allowed: at most {allowed:,}",
            hint=f"Wait until some have started, or cancel some; the limit is {setting}.",
            limit=setting,
            retry_after_s=QUEUE_AGAIN_S,
        )
