"""Sends one notice as a mail, by the server that ``HEADROOM_EMAIL_URL`` names."""

import smtplib

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.mail import EmailMessage
from django.core.validators import validate_email

from optimizer.base.errors import InvalidInput

ACCEPTED = 250
"""A mail server's answer to what it has taken."""


def check_address(address: str) -> None:
    """Raises InvalidInput for what is no address, lies outside of the domains that are allowed, or has no server to go by."""
    if not settings.HEADROOM_EMAIL_URL:
        raise _refused(
            address, "this service sends no mail", allowed="a webhook or slack", hint="An administrator sets HEADROOM_EMAIL_URL."
        )
    try:
        validate_email(address)
    except ValidationError as error:
        raise _refused(address, "it is no mail address", allowed="name@domain") from error
    domains = [domain.lower() for domain in settings.HEADROOM_EMAIL_DOMAINS]
    if domains and address.rpartition("@")[2].lower() not in domains:
        raise _refused(address, "its domain is not allowed", allowed=", ".join(domains))


def send_mail(address: str, *, subject: str, text: str, message_id: str) -> tuple[int | None, str]:
    """The server's answer, and what went wrong. message_id: the same for a mail that is sent again."""
    domain = settings.DEFAULT_FROM_EMAIL.rpartition("@")[2].rstrip("> ") or "headroom"
    headers = {"Message-ID": f"<{message_id}@{domain}>", "Auto-Submitted": "auto-generated"}
    try:
        EmailMessage(subject=subject, body=text, to=[address], headers=headers).send()
    except smtplib.SMTPResponseException as error:
        reason = error.smtp_error.decode(errors="replace") if isinstance(error.smtp_error, bytes) else str(error.smtp_error)
        return error.smtp_code, reason
    except smtplib.SMTPRecipientsRefused as error:
        return next(((code, reason.decode(errors="replace")) for code, reason in error.recipients.values()), (None, "refused"))
    except (smtplib.SMTPException, OSError) as error:
        return None, f"{type(error).__name__}: {error}".rstrip(": ")
    return ACCEPTED, ""


def _refused(address: str, why: str, *, allowed: str, hint: str = "") -> InvalidInput:
    return InvalidInput(f"{address[:120]!r}: {why}", field="url", value=address[:120], allowed=allowed, hint=hint)
