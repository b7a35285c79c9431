"""One try to send one message, as a POST or a mail, and how it went. Touches no database.

Of an answer nothing is believed: at most 64 KiB of it are read, redirects are not followed, and TIMEOUT_S are all that the call
gets, from its beginning to its end and however the answer drips in.
"""

import asyncio
import json
import time
from dataclasses import dataclass

import httpx

from optimizer.base.errors import InvalidInput
from webapp.webhooks.mail import send_mail
from webapp.webhooks.models import Delivery, Kind
from webapp.webhooks.signing import signed_headers
from webapp.webhooks.targets import Target, find_target

TIMEOUT_S = 5.0
_READ_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one try."""

    status_code: int | None
    trouble: str
    duration_ms: int

    @property
    def is_delivered(self) -> bool:
        return self.status_code is not None and 200 <= self.status_code < 300


def call(delivery: Delivery) -> Outcome:
    """Send it to its address. Beyond TIMEOUT_S only a name server or a mail server can keep this waiting; what comes of the first
    after that is not called any more."""
    started_s = time.monotonic()
    if delivery.webhook.kind == Kind.EMAIL:
        mail = json.loads(delivery.body)
        status_code, trouble = send_mail(delivery.webhook.url, **mail, message_id=delivery.pk)
        return outcome(status_code, trouble, started_s=started_s)
    body = delivery.body.encode()
    try:
        target = find_target(delivery.webhook.url)
        headers = {**_headers(delivery, body), "host": target.host_header}
        status_code, trouble = asyncio.run(_post(target, body, headers, deadline_s=started_s + TIMEOUT_S))
    except TimeoutError:
        status_code, trouble = None, no_answer(TIMEOUT_S)
    except InvalidInput as error:
        status_code, trouble = None, error.message
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        status_code, trouble = None, f"{type(error).__name__}: {error}".rstrip(": ")
    return outcome(status_code, trouble, started_s=started_s)


def outcome(status_code: int | None, trouble: str, *, started_s: float) -> Outcome:
    took_ms = round((time.monotonic() - started_s) * 1000)
    return Outcome(status_code=status_code, trouble=trouble[:300], duration_ms=took_ms)


def no_answer(limit_s: float) -> str:
    return f"no answer within {limit_s:g} s"


def _headers(delivery: Delivery, body: bytes) -> dict[str, str]:
    """A channel knows no signature."""
    if delivery.webhook.kind == Kind.SLACK:
        return {"content-type": "application/json"}
    return signed_headers(delivery.webhook, delivery_id=delivery.pk, timestamp_s=int(time.time()), body=body)


async def _post(target: Target, body: bytes, headers: dict[str, str], *, deadline_s: float) -> tuple[int, str]:
    """The status, and of an answer that is no success how it begins. Raises TimeoutError where no status came in time.

    Asynchronous for its one deadline: httpx's own limits are for each read, and a line every few seconds meets them for days.
    """
    status_code, begun = None, b""
    try:
        async with (
            asyncio.timeout(max(0.0, deadline_s - time.monotonic())),
            # trust_env: a proxy of the environment would resolve the name itself, after the check
            httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as client,
            client.stream(
                "POST", target.connect_url, content=body, headers=headers, extensions={"sni_hostname": target.host}
            ) as answer,
        ):
            status_code = answer.status_code
            async for chunk in answer.aiter_raw():
                begun += chunk
                if len(begun) >= _READ_BYTES:
                    break
    except (TimeoutError, httpx.TimeoutException) as error:
        if status_code is None:
            raise TimeoutError from error
    if status_code is None:
        raise TimeoutError
    text = begun[:200].decode(errors="replace")
    is_success = 200 <= status_code < 300
    return status_code, "" if is_success else "".join(c if c.isprintable() else " " for c in text)
