"""What permissions refuse.

HeadroomError
└── Forbidden   the API answers 403, with what is missing and who can allow it
"""

from optimizer.base.errors import HeadroomError


class Forbidden(HeadroomError):
    """Who asks is known, and what they ask for is there; they may not."""

    code = "forbidden"


class NotSignedInError(Exception):
    """Nobody is known to ask: a page leads to the log-in, the API answers 401."""
