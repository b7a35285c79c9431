"""Passwords that an account may not have are refused."""

import pytest
from django.contrib.auth.models import User
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.test import Client

GUESSABLE = (
    "aaaaaaaaaaaa",
    "123456789012",
    "alicealicealice",
    "alice1234567890",
    "ALICE-alice-Alice",
    "abcabcabcabcabc",
    "qwertyuiop123456",
    "poiuytrewqasdf",
    "headroomheadroom",
    "headroom12345",
    "zzzzzzzzzzzzyyyyyyyy",
    "mnopqrstuvwxyz",
    "121212121212121",
    "passwordpassword",
)


@pytest.mark.parametrize("password", GUESSABLE)
def test_a_password_that_follows_from_a_pattern_is_refused(password: str) -> None:
    with pytest.raises(ValidationError):
        validate_password(password, User(username="alice"))


@pytest.mark.parametrize("password", ["correct horse battery", "Vb7-tulip-Ostrava", "alices kitchen is green"])
def test_a_phrase_of_several_words_is_taken(password: str) -> None:
    validate_password(password, User(username="alice"))


def test_the_page_says_why_a_password_is_refused(client: Client, ada: User) -> None:
    client.force_login(ada)
    sent = {"old_password": "correct horse battery", "new_password1": "adaadaadaada", "new_password2": "adaadaadaada"}
    answer = client.post("/password/", sent)
    assert "0 of its 12 characters count; at least 8 must." in answer.content.decode()
    ada.refresh_from_db()
    assert ada.check_password("correct horse battery")
