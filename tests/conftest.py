"""What all tests share: no progress bars or downloads from libraries, one thread for torch where it is used at all."""

import os
import sys

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _one_torch_thread():
    """Bitwise comparisons must not depend on how sums are split over threads. Does not import torch by itself."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty HEADROOM_HOME for what reads it from the environment."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("HEADROOM_HOME", str(folder))
    return folder
