"""API tokens. Users are Django's own."""

from django.conf import settings
from django.db import models


class ApiToken(models.Model):
    """A bearer token ``hr_<id8>_<secret>_<crc>``; only a keyed hash of the secret is stored."""

    token_id = models.CharField(max_length=8, primary_key=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="api_tokens")
    name = models.CharField(max_length=100)
    secret_hmac = models.CharField(max_length=64)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return f"{self.name} ({self.token_id})"
