"""Errors raised where permissions and limits refuse.

HeadroomError
├── Forbidden      the API answers 403, with what is missing and who can allow it
├── LimitReached   the API answers 429, with the limit and Retry-After
└── SearchesBusy   no search can begin just now; the API answers 503
"""

from optimizer.base.errors import HeadroomError


class Forbidden(HeadroomError):
    """The caller is known and the thing exists, but they may not do this."""

    code = "forbidden"


class LimitReached(HeadroomError):
    """A person or a project has reached a limit of the settings; its fields name the setting and when to try again."""

    code = "limit_reached"


class SearchesBusy(HeadroomError):
    """Nothing is wrong with the question; it can be asked again in a moment."""

    code = "searches_busy"
    retry_after_s = 5

    def __init__(self, found: str) -> None:
        super().__init__(f"{found}, so this one cannot be answered now", hint=f"Ask again in {self.retry_after_s} seconds.")


class NotSignedInError(Exception):
    """Nobody is known to ask: a page leads to the log-in, the API answers 401."""
