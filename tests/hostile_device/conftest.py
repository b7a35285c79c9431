import pytest
import torch

from tests.optimizer.conftest import _shared_valkey as _shared_valkey
from tests.optimizer.conftest import remote as remote


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_NUM_THREADS", "1")
    torch.set_num_threads(1)
