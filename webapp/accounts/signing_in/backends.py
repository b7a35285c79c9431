"""Passwords behind the brake of ``brake.py``."""

from typing import Any

from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from webapp.accounts.signing_in.brake import note_success, take_try


class ThrottledBackend(ModelBackend):
    """Django's own backend, asked only as often as the brake allows."""

    def authenticate(
        self, request: HttpRequest | None, username: str | None = None, password: str | None = None, **kwargs: Any
    ) -> User | None:
        """Raises PermissionDenied, which Django shows as a failed login, before a throttled password is even hashed."""
        if username is None or password is None:
            return None
        address = str(request.META.get("REMOTE_ADDR", "")) if request is not None else ""
        if not take_try(username, address):
            raise PermissionDenied
        user = super().authenticate(request, username=username, password=password, **kwargs)
        if user is not None:
            note_success(username, address)
        return user
