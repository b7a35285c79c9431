"""bitsandbytes' 4- and 8-bit checkpoints are unpacked to the numbers that bitsandbytes itself unpacks them to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from optimizer.base.errors import InvalidModel
from optimizer.base.optional import load_bitsandbytes
from optimizer.models.build import build_model, load_weights
from optimizer.models.files.readers import TensorReader, tensor_readers
from optimizer.models.spec import read_model_spec
from optimizer.runtime.layers.quantize import pack, unpack
from tests.optimizer.models.small_configs import SMALL_CONFIGS

load_bitsandbytes(needed_for="its own tests")

from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, quantize_4bit  # noqa: E402


def four_bit(weight: torch.Tensor, name: str, **options: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors that transformers saves, and what bitsandbytes unpacks them to."""
    packed, state = quantize_4bit(weight, **options)
    tensors = {name: packed, **{f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}}
    return tensors, dequantize_4bit(packed, state)


def only(readers: list[TensorReader], name: str) -> TensorReader:
    (found,) = [reader for reader in readers if reader.name == name]
    return found


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("shape", "blocksize"), [((48, 64), 64), ((20, 36), 64), ((64, 256), 128)])
def test_four_bits_are_unpacked_as_bitsandbytes_does(
    tmp_path: Path, quant_type: str, nested: bool, shape: tuple[int, int], blocksize: int
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    options = {"quant_type": quant_type, "compress_statistics": nested, "blocksize": blocksize}
    tensors, expected = four_bit(weight, "a.weight", **options)
    save_file({**tensors, "b.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    readers = tensor_readers(tmp_path)
    assert {reader.name for reader in readers} == {"a.weight", "b.weight"}
    reader = only(readers, "a.weight")
    assert (reader.packing, reader.shape, reader.dtype) == (quant_type, shape, torch.float32)
    assert torch.equal(reader.read(), expected)


def test_words_of_another_dtype_are_read_as_bytes(tmp_path: Path) -> None:
    tensors, expected = four_bit(torch.randn(32, 64), "a.weight", quant_type="nf4", quant_storage=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(only(tensor_readers(tmp_path), "a.weight").read(), expected)


def test_packing_what_was_unpacked_gives_the_same_codes(tmp_path: Path) -> None:
    """A plan that packs to nf4 in the same blocks holds what the checkpoint held, to the last bit where scales are fp32."""
    tensors, expected = four_bit(torch.randn(48, 64), "a.weight", quant_type="nf4", blocksize=64, compress_statistics=False)
    save_file(tensors, tmp_path / "model.safetensors")
    packed, scales, form = pack(only(tensor_readers(tmp_path), "a.weight").read(), "nf4")
    assert torch.equal(packed, tensors["a.weight"].view(-1))
    assert torch.equal(scales.view(-1), tensors["a.weight.absmax"])
    assert torch.equal(unpack(packed, scales, form), expected)


def test_eight_bits_are_unpacked_as_bitsandbytes_does(tmp_path: Path) -> None:
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    scales = weight.abs().amax(dim=1)
    packed = torch.round(weight * 127 / scales.unsqueeze(1)).to(torch.int8)
    tensors = {"a.weight": packed, "a.SCB": scales, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    save_file({**tensors, "a.bias": torch.ones(24)}, tmp_path / "model.safetensors")
    readers = tensor_readers(tmp_path)
    assert {reader.name for reader in readers} == {"a.weight", "a.bias"}
    torch.testing.assert_close(
        only(readers, "a.weight").read(), int8_vectorwise_dequant(packed, scales), rtol=2e-7, atol=0
    )  # bitsandbytes multiplies by 1/127 rounded, this divides


def test_a_packed_model_is_loaded(tmp_path: Path) -> None:
    # rows of whole blocks: bitsandbytes' own kernel for the CPU is wrong where a block spans rows of 32
    spec = read_model_spec({**SMALL_CONFIGS["llama"], "hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
    saved, loaded = build_model(spec, seed=1), build_model(spec, seed=2)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in saved.state_dict().items():
        if name.endswith("_proj.weight"):
            packed, expected = four_bit(value, name, quant_type="nf4", compress_statistics=True)
            tensors |= packed
            value.copy_(expected)
        else:
            tensors[name] = value
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"load_in_4bit": True}}))
    load_weights(loaded, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(saved.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"a.weight.absmax": None}, "a packed matrix without its absmax"),
        ({"a.weight.absmax": torch.ones(3)}, "scales of another size"),
        ({"a.weight": torch.zeros(7, 1, dtype=torch.uint8)}, "7 bytes; allowed: 1,024 for shape"),
        ({"a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b"{}"), dtype=torch.uint8)}, "an unreadable quant_state"),
        (
            {"a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b'{"shape":[-1],"blocksize":64}'), dtype=torch.uint8)},
            "a quant_state with sizes",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    tensors, _ = four_bit(torch.randn(32, 64), "a.weight", quant_type="nf4")
    changed = {name: value for name, value in {**tensors, **change}.items() if value is not None}
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModel, match=text):
        tensor_readers(tmp_path)
