"""Clients of the API: by token, by session, as nobody."""

import pytest
from django.test import Client

from webapp.accounts.tokens import create_token


def token_client(user):
    _, text = create_token(user=user, name="test")
    return Client(headers={"Authorization": f"Bearer {text}"}, raise_request_exception=False)


@pytest.fixture
def as_ada(ada):
    return token_client(ada)


@pytest.fixture
def as_eve(eve):
    return token_client(eve)


@pytest.fixture
def as_nobody():
    return Client(raise_request_exception=False)
