"""Passwords, with a brake: after five failures in a minute a name from one address waits, whatever it sends next."""

from typing import Any

from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import User
from django.core.cache import cache
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

MAX_FAILURES = 5
WINDOW_S = 60


class ThrottledBackend(ModelBackend):
    """Django's own backend; the count is kept by this process, which is enough for one web process."""

    def authenticate(
        self, request: HttpRequest | None, username: str | None = None, password: str | None = None, **kwargs: Any
    ) -> User | None:
        """Raises PermissionDenied, which Django shows as a failed login, before a throttled password is even hashed."""
        key = _key(request, username)
        if cache.get(key, 0) >= MAX_FAILURES:
            raise PermissionDenied
        user = super().authenticate(request, username=username, password=password, **kwargs)
        if user is None and username is not None:
            cache.add(key, 0, WINDOW_S)
            cache.incr(key)
        elif user is not None:
            cache.delete(key)
        return user


def _key(request: HttpRequest | None, username: str | None) -> str:
    address = request.META.get("REMOTE_ADDR", "") if request is not None else ""
    return "login-failures:" + f"{address}:{username}".encode().hex()[:200]
