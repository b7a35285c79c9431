"""Addresses below ``/api/v1/``: the API, its description, and an answer in its own form for what is not there."""

from csp.constants import SELF, UNSAFE_INLINE
from csp.decorators import csp_replace
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import URLPattern, URLResolver, path, re_path
from django.views.decorators.csrf import csrf_exempt

from webapp.api.api import api, openapi_document
from webapp.http.problems import not_found


def openapi_json(request: HttpRequest) -> HttpResponse:
    return JsonResponse(openapi_document())


@csp_replace({"style-src": [SELF, UNSAFE_INLINE]})
def docs(request: HttpRequest) -> HttpResponse:
    """The description as Redoc draws it, which writes its styles into the page: here alone they are let in."""
    return HttpResponse(_render_docs(request))


def _render_docs(request: HttpRequest) -> bytes:
    document = openapi_document()
    operations = [
        {
            "method": method.upper(),
            "path": address,
            "summary": operation.get("summary", ""),
            "description": operation.get("description", ""),
            "parameters": [f"{one['name']} ({one['in']})" for one in operation.get("parameters", [])],
            "body": list(operation.get("requestBody", {}).get("content", {})),
            "answers": ", ".join(str(status) for status in operation.get("responses", {})),
        }
        for address, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return render(request, "api/docs.html", {"operations": operations, "info": document["info"]}).content


@csrf_exempt
def nothing_here(request: HttpRequest, rest: str = "") -> HttpResponse:
    return not_found()


urlpatterns: list[URLPattern | URLResolver] = [
    path("openapi.json", openapi_json, name="openapi"),
    path("docs", docs, name="api_docs"),
    *api.urls[0],
    re_path(r"^(?P<rest>.*)$", nothing_here),
]
