"""Refuses parameters of an address that its route does not read: a misspelt filter must not answer with everything."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest

from optimizer.base.errors import InvalidInput

NamesOf = Callable[[str, str], frozenset[str]]
"""Names that a route reads, by method and route."""


def refusing_unknown(names_of: NamesOf) -> Callable[[Any], Any]:
    """A decorator for views of the API."""

    def decorate(view: Any) -> Any:
        if iscoroutinefunction(view):

            @wraps(view)
            async def answer_async(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                _check(request, names_of)
                return await view(request, *args, **kwargs)

            return answer_async

        @wraps(view)
        def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            _check(request, names_of)
            return view(request, *args, **kwargs)

        return answer

    return decorate


def _check(request: HttpRequest, names_of: NamesOf) -> None:
    match = request.resolver_match
    if not request.GET or match is None:
        return
    known = names_of(str(request.method), match.route)
    unknown = sorted(set(request.GET) - known)
    if unknown:
        listed = ", ".join(sorted(known)) or "none"
        raise InvalidInput(
            f"the address has the parameter {unknown[0]!r}, which {match.route} does not read; it reads: {listed}",
            hint="Correct the name, or leave it out.",
            field=unknown[0],
            value=request.GET[unknown[0]],
            allowed=sorted(known),
        )
