"""``GET /metrics`` in Prometheus' text format, for a scraper with the token of the settings or for administrators."""

import secrets

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from webapp.accounts.errors import Forbidden
from webapp.http.auth import authenticate
from webapp.http.problems import problem_of, unauthorized
from webapp.monitoring.collect import ServiceCollector
from webapp.monitoring.requests import registry_of_all


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    if not _is_scraper(request):
        try:
            user = authenticate(request)
        except Forbidden as error:
            return problem_of(error)
        if user is None:
            return unauthorized()
    service = CollectorRegistry(auto_describe=False)
    service.register(ServiceCollector())
    return HttpResponse(generate_latest(service) + generate_latest(registry_of_all()), content_type=CONTENT_TYPE_LATEST)


def _is_scraper(request: HttpRequest) -> bool:
    scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
    expected = settings.HEADROOM_METRICS_TOKEN
    is_bearer = bool(expected) and scheme.lower() == "bearer"
    return is_bearer and secrets.compare_digest(sent.strip().encode(), expected.encode())
