"""safetensors reads the tensors that were written, in as many files as were asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optimizer.models.files.tensor_files import TensorEntry, write_tensors


def make_entry(name: str, tensor: torch.Tensor, dtype: Any = None) -> TensorEntry:
    return TensorEntry(name=name, shape=tuple(tensor.shape), dtype=dtype or tensor.dtype, read=lambda: tensor)


TENSORS: dict[str, Any] = {
    "a": torch.arange(12.0).reshape(3, 4).T,
    "b": torch.tensor(3.5, dtype=torch.bfloat16),
    "c": torch.arange(7, dtype=torch.int8),
    "d": torch.empty(0, 4),
}


def test_every_tensor_reads_back_with_its_bits(tmp_path: Path) -> None:
    write_tensors([make_entry(name, tensor) for name, tensor in TENSORS.items()], folder=tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name], tensor)


def test_a_tensor_is_converted_to_its_entrys_dtype(tmp_path: Path) -> None:
    tensor = torch.randn(5, 3)
    write_tensors([make_entry("a", tensor, torch.float16)], folder=tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], tensor.half())


def test_shards_hold_at_most_what_was_asked_and_the_index_names_them(tmp_path: Path) -> None:
    entries = [make_entry(str(index), torch.full((10,), float(index))) for index in range(7)]
    write_tensors(entries, folder=tmp_path, max_shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 7 * 40}
    assert sorted(set(index["weight_map"].values())) == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    for name, file in index["weight_map"].items():
        shard = load_file(tmp_path / file)
        assert sum(tensor.nbytes for tensor in shard.values()) <= 100
        assert torch.equal(shard[name], torch.full((10,), float(name)))


def test_a_tensor_larger_than_a_shard_has_its_own(tmp_path: Path) -> None:
    entries = [make_entry("small", torch.zeros(2)), make_entry("large", torch.zeros(100)), make_entry("last", torch.zeros(2))]
    write_tensors(entries, folder=tmp_path, max_shard_bytes=100)
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(files.values())) == 3


def test_a_storage_that_was_written_can_still_be_resized(tmp_path: Path) -> None:
    tensor = torch.arange(4.0)
    write_tensors([make_entry("a", tensor)], folder=tmp_path)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


def test_a_tensor_of_another_shape_than_announced_is_a_fault(tmp_path: Path) -> None:
    entry = TensorEntry(name="a", shape=(2,), dtype=torch.float32, read=lambda: torch.zeros(3))
    with pytest.raises(ValueError, match=r"a was read with shape \(3,\), not \(2,\)"):
        write_tensors([entry], folder=tmp_path)
