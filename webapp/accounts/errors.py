"""Errors raised where permissions refuse.

HeadroomError
├── Forbidden      the API answers 403, with what is missing and who can allow it
└── LimitReached   the API answers 429, with the limit and Retry-After
"""

from optimizer.base.errors import HeadroomError


class Forbidden(HeadroomError):
    """The caller is known and the thing exists, but they may not do this."""

    code = "forbidden"


class LimitReached(HeadroomError):
    """A person or a project has reached a limit of the settings; its fields name the setting and when to try again."""

    code = "limit_reached"


class NotSignedInError(Exception):
    """Nobody is known to ask: a page leads to the log-in, the API answers 401."""
