"""API tokens: ``hr_<id8>_<secret43>_<crc>``. Shown once; only a keyed hash of the secret is kept.

The prefix and the checksum let scanners find a leaked token without asking the server (github.blog, 2021-04-05). The key of the
hash is derived from SECRET_KEY, so a stolen database alone proves no token.
"""

import hashlib
import hmac
import logging
import re
import secrets
import zlib
from datetime import timedelta

from django.conf import settings
from django.contrib.auth.models import User
from django.core.cache import cache
from django.db import OperationalError, transaction
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.base.errors import InvalidInput
from webapp.accounts.access import Acting, act_as
from webapp.accounts.models import ApiToken, Project, Scope
from webapp.prepared import Prepared, number_mark, text_mark

logger = logging.getLogger(__name__)

DEFAULT_DAYS = 90
MAX_DAYS = 365
_PATTERN = re.compile(r"hr_([a-z0-9]{8})_([A-Za-z0-9_-]{43})_([0-9a-f]{8})")
_TOKEN: "Prepared[ApiToken]" = Prepared(lambda: ApiToken.objects.filter(token_id=text_mark("token_id")).order_by(), "token_id")
_OWNER: "Prepared[User]" = Prepared(lambda: User.objects.filter(pk=number_mark("user_id")), "user_id")
_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_USED_AGAIN = timedelta(minutes=1)
_NOTED_AGAIN_S = 30
"""``last_used_at`` is for people; writing it with each request would make reads into writes."""


def create_token(
    *, user: User, name: str, days: int = DEFAULT_DAYS, scope: Scope = Scope.WRITE, project: Project | None = None
) -> tuple[ApiToken, str]:
    """The row and the token's text, which cannot be had again. project: the only one that it opens."""
    if not 1 <= days <= MAX_DAYS:
        raise InvalidInput(
            f"days is {days}; allowed: 1 to {MAX_DAYS}", field="days", value=days, allowed={"minimum": 1, "maximum": MAX_DAYS}
        )
    name = name.strip()
    if not 1 <= len(name) <= 100:
        raise InvalidInput("name is empty or too long; allowed: 1 to 100 characters", field="name", value=name)
    token_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(8))
    secret = secrets.token_urlsafe(32)
    row = ApiToken.objects.create(
        token_id=token_id,
        user=user,
        name=name,
        scope=scope,
        project=project,
        secret_hmac=_hash(secret),
        expires_at=timezone.now() + timedelta(days=days),
    )
    return row, f"hr_{token_id}_{secret}_{_crc(token_id, secret)}"


def find_token_user(text: str) -> User | None:
    """Whose token this is, at work with its scope and in its project; None for anything malformed, unknown, expired, revoked,
    or of an inactive user."""
    match = _PATTERN.fullmatch(text)
    if match is None or match.group(3) != _crc(match.group(1), match.group(2)):
        return None
    row = _TOKEN.first(token_id=match.group(1))
    # the comparison runs for unknown ids too, so that time does not reveal which ids exist
    matches = secrets.compare_digest(row.secret_hmac if row else "0" * 64, _hash(match.group(2)))
    if row is None or not matches:
        return None
    owner = _OWNER.first(user_id=row.user_id)
    if owner is None:  # deleted since, and the token with it
        return None
    row.user = owner
    if not _is_valid(row):
        return None
    if row.last_used_at is None or timezone.now() - row.last_used_at > _USED_AGAIN:
        _note_use(row)
    act_as(
        row.user,
        Acting(
            scope=Scope(row.scope), token_id=row.pk, project_id=row.project_id or "", is_bound=row.project_id is not None
        ),
    )
    return row.user


def _note_use(row: ApiToken) -> None:
    """Twice a minute at most. A moment that cannot be written, as on a full disk, must not keep the owner from reading."""
    if not cache.add(f"token-noted-{row.pk}", "noted", _NOTED_AGAIN_S):
        return
    try:
        with transaction.atomic():
            ApiToken.objects.filter(pk=row.pk).update(last_used_at=Now())
    except OperationalError as error:
        logger.warning("the use of token %s is not noted: %s", row.pk, error)


def is_still_valid(token_id: str) -> bool:
    """Report whether a token that was found before would be found again."""
    row = ApiToken.objects.select_related("user").filter(pk=token_id).first()
    return row is not None and _is_valid(row)


def revoke_token(token: ApiToken) -> bool:
    """False when it was revoked before."""
    return bool(ApiToken.objects.filter(pk=token.pk, revoked_at__isnull=True).update(revoked_at=Now()))


def _is_valid(row: ApiToken) -> bool:
    return row.revoked_at is None and row.expires_at > timezone.now() and row.user.is_active


def _hash(secret: str) -> str:
    pepper = hmac.new(settings.SECRET_KEY.encode(), b"headroom api tokens v1", hashlib.sha256).digest()
    return hmac.new(pepper, secret.encode(), hashlib.sha256).hexdigest()


def _crc(token_id: str, secret: str) -> str:
    return f"{zlib.crc32(f'hr_{token_id}_{secret}'.encode()):08x}"
