"""Errors raised where permissions refuse.

HeadroomError
└── Forbidden   the API answers 403, with what is missing and who can allow it
"""

from optimizer.base.errors import HeadroomError


class Forbidden(HeadroomError):
    """The caller is known and the thing exists, but they may not do this."""

    code = "forbidden"


class NotSignedInError(Exception):
    """Nobody is known to ask: a page leads to the log-in, the API answers 401."""
