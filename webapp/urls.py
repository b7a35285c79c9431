"""Where each address goes: pages for people, ``/api/v1`` for programs."""

from django.urls import URLPattern, URLResolver

urlpatterns: list[URLPattern | URLResolver] = []
