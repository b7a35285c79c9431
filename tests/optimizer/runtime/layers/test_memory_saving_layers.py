"""Memory-saving layers replace the models' own, unless a setting leaves all as they are."""

from pathlib import Path
from typing import Any

import pytest

from optimizer.formats.stock_layers import stock_layers, uses_memory_saving_layers
from optimizer.models.build import build_model
from optimizer.profile.extent import Extent
from optimizer.profile.keep.kept import keep_profile, read_kept_profile
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.layers.memory_saving_layers import use_memory_saving_layers
from tests.optimizer.runtime.tiny import make_spec


def test_norms_and_capped_attention_run_lighter_until_undone() -> None:
    model: Any = build_model(make_spec("gemma2"))
    undo = use_memory_saving_layers(model)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert model.config._attn_implementation != "eager"
    undo()
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert model.config._attn_implementation == "eager"


def test_the_setting_leaves_models_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(make_spec("gemma2"))
    with stock_layers():
        assert not uses_memory_saving_layers()
        use_memory_saving_layers(model)
    assert uses_memory_saving_layers()
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    monkeypatch.setenv("HEADROOM_LAYERS", "own")
    with stock_layers():
        pass
    assert not uses_memory_saving_layers()


def test_profiles_are_kept_apart_by_it(tmp_path: Path) -> None:
    spec = make_spec("llama")
    extent = Extent(representations=("fp32",), choices=("keep",), shapes=((2, 16),))
    light = profile_model(spec, extent=extent)
    keep_profile(light, folder=tmp_path)
    with stock_layers():
        assert read_kept_profile(light.model_fingerprint, is_padded=False, folder=tmp_path) is None
        own = profile_model(spec, extent=extent)
        keep_profile(own, folder=tmp_path)
        assert read_kept_profile(own.model_fingerprint, is_padded=False, folder=tmp_path) == own
    assert read_kept_profile(light.model_fingerprint, is_padded=False, folder=tmp_path) == light
    assert own != light
