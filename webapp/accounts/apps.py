"""Django's handle on this app: Users' tokens."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "webapp.accounts"
