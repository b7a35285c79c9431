"""Addresses below ``/v1/``: the routes, and OpenAI's form of every way in which a request can fail."""

import logging
from typing import Any

from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse, RawPostDataException
from django.http.multipartparser import MultiPartParserError
from django.urls import URLPattern, URLResolver, re_path
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError

from optimizer.base.errors import HeadroomError
from webapp.api.routes.batches import router
from webapp.api.routes.chat import router as chat_router
from webapp.batches.answers import answer_of, error_answer, not_found, unauthorized
from webapp.http.auth import TokenOrSession
from webapp.http.parsing import JsonParser
from webapp.http.storage import storage_trouble

logger = logging.getLogger(__name__)


class TokenOnly(TokenOrSession):
    """A browser's session does not count here."""

    def __call__(self, request: HttpRequest) -> Any:
        return super().__call__(request) if request.headers.get("Authorization") else None


api = NinjaAPI(
    title="Headroom, after OpenAI's API",
    version="1",
    urls_namespace="openai-v1",
    auth=TokenOnly(),
    parser=JsonParser(),
    docs_url=None,
    openapi_url=None,
)
api.add_router("", router)
api.add_router("", chat_router)


@api.exception_handler(HeadroomError)
def _headroom_error(request: HttpRequest, error: HeadroomError) -> HttpResponse:
    return answer_of(error)


@api.exception_handler(Http404)
def _not_found(request: HttpRequest, error: Http404) -> HttpResponse:
    return not_found(str(error) or "address")


@api.exception_handler(AuthenticationError)
def _unauthorized(request: HttpRequest, error: AuthenticationError) -> HttpResponse:
    return unauthorized()


@api.exception_handler(ValidationError)
def _validation_error(request: HttpRequest, error: ValidationError) -> HttpResponse:
    found = error.errors[0] if error.errors else {}
    param = ".".join(str(part) for part in found.get("loc", ())[2:]) or str((found.get("loc") or ("",))[-1])
    return error_answer(400, f"{param}: {found.get('msg', 'invalid')}", param=param, code="invalid_request")


@api.exception_handler(HttpError)
def _http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
    if isinstance(error.__cause__, ValueError):  # why the parser of bodies gave up
        return error_answer(error.status_code, f"the body cannot be read as JSON: {error.__cause__}", code="invalid_json")
    return error_answer(error.status_code, str(error))


@api.exception_handler(MultiPartParserError)
@api.exception_handler(SuspiciousOperation)
@api.exception_handler(RawPostDataException)
def _bad_form(request: HttpRequest, error: Exception) -> HttpResponse:
    status = 413 if isinstance(error, RequestDataTooBig) else 400
    return error_answer(status, f"the form cannot be read: {error}", code="invalid_request")


@api.exception_handler(Exception)
def _fault(request: HttpRequest, error: Exception) -> HttpResponse:
    """A fault of the program, its disk or its database: what happened goes to the log, not to the caller."""
    if (trouble := storage_trouble(error)) is not None:
        logger.error("%s %s failed: %s", request.method, request.path, error)
        return answer_of(trouble)
    logger.error("%s %s failed", request.method, request.path, exc_info=error)
    return error_answer(500, "the server failed; its log says more", code="internal")


@csrf_exempt
def nothing_here(request: HttpRequest, rest: str = "") -> HttpResponse:
    return not_found(f"address: {request.method} /v1/{rest}"[:200])


urlpatterns: list[URLPattern | URLResolver] = [*api.urls[0], re_path(r"^(?P<rest>.*)$", nothing_here)]
