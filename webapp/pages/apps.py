"""Django's handle on this app: the pages people look at; no tables of its own."""

from django.apps import AppConfig


class PagesConfig(AppConfig):
    name = "webapp.pages"
