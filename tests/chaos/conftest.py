"""A database server that campaigns may crash, and that is nobody else's."""

from collections.abc import Iterator

import pytest

from tests.postgresql import running_postgresql


@pytest.fixture
def own_postgresql_url() -> Iterator[str]:
    with running_postgresql() as url:
        yield url
