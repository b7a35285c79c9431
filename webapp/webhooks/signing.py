"""Secrets and signatures after Standard Webhooks (https://www.standardwebhooks.com): any of its libraries verifies them.

A secret is worked out, not stored: HMAC-SHA256 of the address's id under a key derived from SECRET_KEY. A stolen database alone
forges nothing; with another SECRET_KEY all secrets are others.
"""

import base64
import hashlib
import hmac

from django.conf import settings

from webapp.webhooks.models import Webhook

SECRET_PREFIX = "whsec_"


def secret_of(webhook: Webhook) -> str:
    """The secret as its owner keeps it: ``whsec_`` and 32 bytes in base64."""
    return SECRET_PREFIX + base64.b64encode(_key_of(webhook)).decode()


def signed_headers(webhook: Webhook, *, delivery_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """``webhook-signature`` is over ``id.timestamp.body``, so that neither can be put to another message."""
    signed = f"{delivery_id}.{timestamp_s}.".encode() + body
    signature = base64.b64encode(hmac.new(_key_of(webhook), signed, hashlib.sha256).digest()).decode()
    return {
        "content-type": "application/json",
        "user-agent": "Headroom-Webhooks/1",
        "webhook-id": delivery_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": f"v1,{signature}",
    }


def _key_of(webhook: Webhook) -> bytes:
    key = hmac.new(settings.SECRET_KEY.encode(), b"headroom webhooks v1", hashlib.sha256).digest()
    return hmac.new(key, f"{webhook.pk}:{webhook.secret_number}".encode(), hashlib.sha256).digest()
