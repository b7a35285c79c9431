import gc
from collections.abc import Iterator

import pytest
import torch

from optimizer.runtime.meter.device import prepared_device


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run side by side; more threads would only slow each other."""
    monkeypatch.setenv("HEADROOM_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture
def prepared_card() -> Iterator[None]:
    """A card as the runtime prepares it, left empty."""
    with prepared_device(torch.device("cuda:0")):
        yield
    gc.collect()
    torch.cuda.empty_cache()
