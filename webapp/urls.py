"""Routes addresses: pages for people, ``/api/v1`` for programs, ``/v1`` for those that speak OpenAI's Batch API."""

from django.urls import URLPattern, URLResolver, include, path

from webapp.api.routes.health import healthz, readyz
from webapp.monitoring.view import metrics

handler500 = "webapp.http.storage.answer_fault"
urlpatterns: list[URLPattern | URLResolver] = [
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
    path("metrics", metrics, name="metrics"),
    path("api/v1/", include("webapp.api.urls")),
    path("v1/", include("webapp.api.batch_urls")),
    path("", include("webapp.pages.urls")),
]
