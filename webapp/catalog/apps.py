"""Django's handle on this app: Models, datasets, machines."""

from django.apps import AppConfig


class CatalogConfig(AppConfig):
    name = "webapp.catalog"
