"""The only way to read this app's rows."""

from typing import Any

from django.db.models import QuerySet

from webapp.accounts.models import ApiToken


def tokens_visible_to(user: Any) -> QuerySet[ApiToken]:
    """A person's own tokens, for administrators too."""
    return ApiToken.objects.filter(user=user) if user.is_authenticated else ApiToken.objects.none()
