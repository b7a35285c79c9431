"""Clients of the API: by token, by session, as nobody."""

import pytest
from django.contrib.auth.models import User
from django.test import Client

from webapp.accounts.tokens import create_token


def token_client(user: User) -> Client:
    _, text = create_token(user=user, name="test")
    return Client(headers={"Authorization": f"Bearer {text}"}, raise_request_exception=False)


@pytest.fixture
def as_ada(ada: User) -> Client:
    return token_client(ada)


@pytest.fixture
def as_eve(eve: User) -> Client:
    return token_client(eve)


@pytest.fixture
def as_nobody() -> Client:
    return Client(raise_request_exception=False)
