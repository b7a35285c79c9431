"""API tokens."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from pytest_django import Settings

from optimizer.base.errors import InvalidInput
from webapp.accounts.models import ApiToken
from webapp.accounts.queries import tokens_visible_to
from webapp.accounts.tokens import create_token, find_token_user, revoke_token


def test_a_token_finds_its_user_and_is_stored_as_a_hash_only(ada: User) -> None:
    row, text = create_token(user=ada, name="laptop")
    assert find_token_user(text) == ada
    secret = text.split("_", 2)[2]
    assert secret[:43] not in str(ApiToken.objects.values().get())
    assert row.expires_at - timezone.now() > timedelta(days=89)


def test_a_token_has_the_shape_that_scanners_look_for(ada: User) -> None:
    _, text = create_token(user=ada, name="laptop")
    prefix, token_id, rest = text.split("_", 2)
    assert (prefix, len(token_id), len(rest)) == ("hr", 8, 43 + 1 + 8)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-1],
        lambda text: text[:-1] + ("0" if text[-1] != "0" else "1"),
        lambda text: text.replace("hr_", "gh_", 1),
        lambda text: text + " ",
        lambda text: "hr_" + "a" * 8 + text[11:],
        lambda text: "",
    ],
)
def test_a_spoiled_token_finds_nobody(ada: User, spoil: Callable[..., Any]) -> None:
    _, text = create_token(user=ada, name="laptop")
    assert find_token_user(spoil(text)) is None


def test_an_expired_token_finds_nobody(ada: User) -> None:
    row, text = create_token(user=ada, name="laptop")
    ApiToken.objects.filter(pk=row.pk).update(expires_at=timezone.now())
    assert find_token_user(text) is None


def test_a_revoked_token_finds_nobody_and_is_revoked_once(ada: User) -> None:
    row, text = create_token(user=ada, name="laptop")
    assert revoke_token(row)
    assert not revoke_token(row)
    assert find_token_user(text) is None


def test_the_token_of_an_inactive_person_finds_nobody(ada: User) -> None:
    _, text = create_token(user=ada, name="laptop")
    ada.is_active = False
    ada.save()
    assert find_token_user(text) is None


def test_tokens_of_another_secret_key_find_nobody(ada: User, settings: Settings) -> None:
    _, text = create_token(user=ada, name="laptop")
    settings.SECRET_KEY = "another"
    assert find_token_user(text) is None


@pytest.mark.parametrize("days", [0, 366])
def test_a_token_lives_at_most_a_year(ada: User, days: int) -> None:
    with pytest.raises(InvalidInput, match=f"days is {days}; allowed: 1 to 365"):
        create_token(user=ada, name="laptop", days=days)


def test_people_see_their_own_tokens_only(ada: User, eve: User, admin: User) -> None:
    create_token(user=ada, name="laptop")
    assert tokens_visible_to(ada).count() == 1
    assert tokens_visible_to(eve).count() == 0
    assert tokens_visible_to(admin).count() == 0
