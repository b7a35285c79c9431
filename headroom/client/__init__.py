"""A typed client of the REST API, for the command line, the demo and people's own scripts.

It knows addresses, problem documents and the event stream; it draws nothing and decides nothing. Answers are the API's own, typed
by ``types.py``. Files of more than a piece go up in pieces: what a cut leaves is gone on from, also by a later process.
"""

from headroom.client.calls import HeadroomClient
from headroom.client.connection import (
    ApiProblem,
    JobTooSlow,
    Row,
    ServiceUnreachable,
    StreamEvent,
    parse_events,
)

__all__ = [
    "ApiProblem",
    "HeadroomClient",
    "JobTooSlow",
    "Row",
    "ServiceUnreachable",
    "StreamEvent",
    "parse_events",
]
