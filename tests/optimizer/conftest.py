"""Tests marked gpu run where there is a CUDA device; elsewhere they are left out, not skipped: each has a twin on the CPU.
A real store for the remote tier is started once for all tests that use one, and so are the processes of ranks.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.left_out import NUM_LEFT_OUT
from tests.optimizer.runtime.ranks.pool import RankPool

if TYPE_CHECKING:
    # The machine of a card has nothing of the service, and its tests start no store.
    from tests.valkey import Valkey


@pytest.fixture(scope="session")
def _shared_valkey() -> "Iterator[Valkey]":
    from tests.valkey import Valkey

    server = Valkey()
    yield server
    server.close()


@pytest.fixture
def remote(_shared_valkey: "Valkey", monkeypatch: pytest.MonkeyPatch) -> "Valkey":
    """A running store that the remote tier is configured for, empty."""
    monkeypatch.setenv("HEADROOM_REMOTE_URL", _shared_valkey.url)
    with _shared_valkey.client() as client:
        client.flushall()
    return _shared_valkey


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Started once; most cases need two processes."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"), num_ranks=2)
    yield pool
    pool.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    items[:] = [item for item in items if item not in marked]
    config.stash[NUM_LEFT_OUT] = len(marked)
    config.hook.pytest_deselected(items=marked)
