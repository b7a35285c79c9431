"""A signed-in person, for the tests of pages."""

import pytest


@pytest.fixture
def browser(client, ada):
    client.force_login(ada)
    return client
