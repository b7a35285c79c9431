import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run side by side; more threads would only slow each other."""
    monkeypatch.setenv("HEADROOM_NUM_THREADS", "1")
    torch.set_num_threads(1)
