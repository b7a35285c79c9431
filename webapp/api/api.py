"""The API itself: routers, and one handler for each way a request can fail."""

import json
import logging
from functools import cache
from http import HTTPStatus
from typing import Any

from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse, RawPostDataException
from django.http.multipartparser import MultiPartParserError
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, Throttled, ValidationError

from optimizer.base.errors import HeadroomError
from webapp.api.openapi import complete_document
from webapp.api.query_parameters import refusing_unknown
from webapp.api.routes import access as account_routes
from webapp.api.routes import catalog as catalog_routes
from webapp.api.routes import chat as chat_routes
from webapp.api.routes import compare as compare_routes
from webapp.api.routes import estimates as estimate_routes
from webapp.api.routes import events as live_routes
from webapp.api.routes import files as file_routes
from webapp.api.routes import jobs as job_routes
from webapp.api.routes import plans as plan_routes
from webapp.api.routes import queue as queue_routes
from webapp.api.routes import uploads as upload_routes
from webapp.api.routes import webhooks as webhook_routes
from webapp.http.auth import CsrfFailedError, TokenOrSession
from webapp.http.parsing import JsonParser
from webapp.http.problems import csrf_failed, field_problems, not_found, problem, problem_of, unauthorized
from webapp.http.storage import storage_trouble

logger = logging.getLogger(__name__)

api = NinjaAPI(
    title="Headroom",
    version="1",
    urls_namespace="api-v1",
    auth=TokenOrSession(),
    parser=JsonParser(),
    docs_url=None,
    openapi_url=None,
)
_ROUTERS = (
    account_routes.router,
    webhook_routes.router,
    catalog_routes.router,
    upload_routes.router,
    job_routes.router,
    compare_routes.router,
    queue_routes.router,
    estimate_routes.router,
    plan_routes.router,
    file_routes.router,
    live_routes.router,
    chat_routes.session_router,
)


@cache
def _query_names() -> dict[tuple[str, str], frozenset[str]]:
    """Names of the parameters that routes read from their address, by method and route."""
    return {
        (method.upper(), path.removeprefix("/").replace("{", "<").replace("}", ">")): frozenset(
            parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"
        )
        for path, methods in openapi_document()["paths"].items()
        for method, operation in methods.items()
    }


def _names_of(method: str, route: str) -> frozenset[str]:
    return _query_names().get(("GET" if method == "HEAD" else method, route), frozenset())


api.add_decorator(refusing_unknown(_names_of), mode="operation")
for router in _ROUTERS:
    api.add_router("", router)


@api.exception_handler(HeadroomError)
def _headroom_error(request: HttpRequest, error: HeadroomError) -> HttpResponse:
    return problem_of(error)


@api.exception_handler(Http404)
def _not_found(request: HttpRequest, error: Http404) -> HttpResponse:
    return not_found()


@api.exception_handler(AuthenticationError)
def _unauthorized(request: HttpRequest, error: AuthenticationError) -> HttpResponse:
    return unauthorized()


@api.exception_handler(CsrfFailedError)
def _csrf_failed(request: HttpRequest, error: CsrfFailedError) -> HttpResponse:
    return csrf_failed()


@api.exception_handler(ValidationError)
def _validation_error(request: HttpRequest, error: ValidationError) -> HttpResponse:
    fields = field_problems(error.errors, sent=_sent_json(request))
    detail = "; ".join(f"{field['field']}: {field['message']}" for field in fields[:3])
    return problem(422, code="invalid_input", detail=detail, fields=fields)


def _sent_json(request: HttpRequest) -> Any:
    try:
        return json.loads(request.body)
    except (ValueError, RecursionError, RawPostDataException):
        return None


@api.exception_handler(Throttled)
def _throttled(request: HttpRequest, error: Throttled) -> HttpResponse:
    headers = {"Retry-After": str(int(error.wait or 1))}
    return problem(429, code="too_many_requests", detail="too many requests", headers=headers)


@api.exception_handler(RawPostDataException)
def _not_json(request: HttpRequest, error: RawPostDataException) -> HttpResponse:
    """A form was sent where JSON is read; the check of its CSRF token has consumed it."""
    return problem(415, code="unsupported_media_type", detail="this takes application/json")


@api.exception_handler(HttpError)
def _http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    if isinstance(error.__cause__, ValueError):  # why the parser of bodies gave up
        return problem(error.status_code, code=code, detail=f"the body cannot be read as JSON: {error.__cause__}")
    return problem(error.status_code, code=code, detail=str(error))


@api.exception_handler(MultiPartParserError)
@api.exception_handler(SuspiciousOperation)
def _bad_form(request: HttpRequest, error: Exception) -> HttpResponse:
    """A form without its boundary, with too many fields or files, …: the sender's fault, whatever Django calls it."""
    status = 413 if isinstance(error, RequestDataTooBig) else 400
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return problem(status, code=code, detail=f"the form cannot be read: {error}")


@api.exception_handler(Exception)
def _fault(request: HttpRequest, error: Exception) -> HttpResponse:
    """A fault of the program, its disk or its database: what happened goes to the log, not to the caller."""
    if (trouble := storage_trouble(error)) is not None:
        logger.error("%s %s failed: %s", request.method, request.path, error)
        return problem_of(trouble)
    logger.error("%s %s failed", request.method, request.path, exc_info=error)
    hint = "Try again; if it stays, report it."
    return problem(500, code="internal", detail="the server failed; its log says more", hint=hint)


def openapi_document() -> Any:
    return complete_document(api, path_prefix="/api/v1/")
