"""Hostile and broken safetensors files are refused before any library opens them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from optimizer.base.errors import InvalidModel
from optimizer.models.files.check_weights import INDEX_FILE, check_weights


def _file_bytes(header: Any, data: bytes = b"", *, header_bytes: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text + data


def _tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _refusal(folder: Path) -> str:
    with pytest.raises(InvalidModel) as caught:
        check_weights(folder)
    assert caught.value.fields["field"].startswith("weights")
    assert caught.value.fields["allowed"]
    return str(caught.value)


def test_a_file_of_the_library_passes_with_its_facts(tmp_path: Path) -> None:
    save_file(
        {"b.weight": np.zeros((3, 4), np.float32), "a.bias": np.zeros(5, np.float16)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    facts = check_weights(tmp_path)
    assert facts.files == ("model.safetensors",)
    assert {(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes) for tensor in facts.tensors} == {
        ("b.weight", "F32", (3, 4), 48),
        ("a.bias", "F16", (5,), 10),
    }
    assert facts.num_elements == 17
    assert facts.num_bytes == (tmp_path / "model.safetensors").stat().st_size


GOOD = {"a": _tensor([2], 0, 8)}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "0 bytes long; allowed: at least 8 bytes"),
    "seven bytes": (b"\0" * 7, "7 bytes long"),
    "header length zero": (_file_bytes(b""), "a header of 0 bytes"),
    "header beyond the file": (_file_bytes(GOOD, b"\0" * 8, header_bytes=10_000), "a header of 10,000 bytes in a file of"),
    "header over the limit": (_file_bytes(b"{}", header_bytes=2**63), "a header of 9,223,372,036,854,775,808 bytes"),
    "header of 17 MB": (_file_bytes(b'{"a":1}' + b" " * 17_000_000), "allowed: 2 to 16,000,000 bytes"),
    "not JSON": (_file_bytes(b"{nonsense"), "not the JSON of a safetensors header"),
    "not UTF-8": (_file_bytes(b'{"\xff": 1}'), "not the JSON of a safetensors header"),
    "a list": (_file_bytes([1]), "not a JSON object"),
    "NaN": (_file_bytes(b'{"a": NaN}'), "NaN is not JSON"),
    "nested a million deep": (_file_bytes(b"[" * 1_000_000), "not the JSON of a safetensors header"),
    "duplicate tensor names": (
        _file_bytes(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
                    b"\0" * 8),
        "the name 'a' occurs twice",
    ),
    "duplicate keys in a tensor": (
        _file_bytes(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8),
        "the name 'dtype' occurs twice",
    ),
    "no tensors": (_file_bytes({}), "0 tensors; allowed: 1 to 50,000"),
    "too many tensors": (
        _file_bytes({f"t{index}": _tensor([0], 0, 0) for index in range(50_001)}),
        "50,001 tensors; allowed: 1 to 50,000",
    ),
    "a path as name": (_file_bytes({"../../etc/x": _tensor([2], 0, 8)}, b"\0" * 8), "a tensor named '../../etc/x'"),
    "an empty name": (_file_bytes({"": _tensor([2], 0, 8)}, b"\0" * 8), "a tensor named ''"),
    "a name of 257": (_file_bytes({"a" * 257: _tensor([2], 0, 8)}, b"\0" * 8), "allowed: 1 to 256 letters"),
    "a name with a line end": (_file_bytes({"a\n": _tensor([2], 0, 8)}, b"\0" * 8), "a tensor named"),
    "an unknown dtype": (_file_bytes({"a": _tensor([2], 0, 8, "PICKLE")}, b"\0" * 8), "tensor a has dtype 'PICKLE'"),
    "a dtype that is a list": (_file_bytes({"a": {**GOOD["a"], "dtype": ["F32"]}}, b"\0" * 8), "tensor a has dtype ['F32']"),
    "a negative size": (_file_bytes({"a": _tensor([-2], 0, 8)}, b"\0" * 8), "tensor a has shape [-2]"),
    "a fractional size": (_file_bytes({"a": {**GOOD["a"], "shape": [2.0]}}, b"\0" * 8), "tensor a has shape [2.0]"),
    "a true size": (_file_bytes({"a": {**GOOD["a"], "shape": [True]}}, b"\0" * 8), "tensor a has shape [True]"),
    "nine dimensions": (_file_bytes({"a": _tensor([1] * 9, 0, 4)}, b"\0" * 4), "at most 8 whole numbers"),
    "a shape that overflows": (_file_bytes({"a": _tensor([2**62, 4], 0, 8)}, b"\0" * 8), "tensor a spans 8 bytes"),
    "offsets reversed": (_file_bytes({"a": _tensor([2], 8, 0)}, b"\0" * 8), "tensor a has data_offsets [8, 0]"),
    "three offsets": (_file_bytes({"a": {**GOOD["a"], "data_offsets": [0, 4, 8]}}, b"\0" * 8), "data_offsets [0, 4, 8]"),
    "span unlike the shape": (_file_bytes({"a": _tensor([3], 0, 8)}, b"\0" * 8), "tensor a spans 8 bytes; allowed: 12"),
    "a gap at the start": (_file_bytes({"a": _tensor([2], 4, 12)}, b"\0" * 12), "tensor a begins at 4; allowed: 0"),
    "a gap between": (
        _file_bytes({"a": _tensor([2], 0, 8), "b": _tensor([2], 12, 20)}, b"\0" * 20),
        "tensor b begins at 12; allowed: 8, without gap or overlap",
    ),
    "an overlap": (
        _file_bytes({"a": _tensor([2], 0, 8), "b": _tensor([2], 4, 12)}, b"\0" * 12),
        "tensor b begins at 4; allowed: 8",
    ),
    "trailing bytes": (_file_bytes(GOOD, b"\0" * 9), "9 bytes of data; allowed: 8"),
    "missing bytes": (_file_bytes(GOOD, b"\0" * 7), "7 bytes of data; allowed: 8"),
    "extra keys": (_file_bytes({"a": {**GOOD["a"], "code": "x"}}, b"\0" * 8), "tensor a has other keys"),
    "metadata with objects": (_file_bytes({"__metadata__": {"a": {"b": "c"}}, **GOOD}, b"\0" * 8), "unusable __metadata__"),
    "metadata over 64 KB": (_file_bytes({"__metadata__": {"a": "x" * 70_000}, **GOOD}, b"\0" * 8), "unusable __metadata__"),
    "a pickle renamed": (b"\x80\x04\x95\x0b\0\0\0\0\0\0\0cos\nsystem\n", "a pickle under a safetensors name"),
    "a zip renamed": (b"PK\x03\x04" + b"\0" * 40, "a zip archive or a torch checkpoint under a safetensors name"),
    "a GGUF renamed": (b"GGUF\x03\0\0\0" + b"\xff" * 40, "a GGUF file under a safetensors name"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_a_hostile_file_is_refused_by_what_is_wrong_with_it(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    assert message in _refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "x.PTH", "a.ckpt", "b.pkl", "c.npy", "d.joblib", "e.gguf"]
)
def test_files_that_may_run_code_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(_file_bytes(GOOD, b"\0" * 8))
    (tmp_path / name).write_bytes(b"")
    assert f"weights file {name}: a format that may run code when read; allowed: safetensors only" in _refusal(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(_file_bytes(GOOD, b"\0" * 8))
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "real")
    assert "not a plain file" in _refusal(folder)


def test_no_weights_and_two_unindexed_files_are_refused(tmp_path: Path) -> None:
    assert "0 safetensors files without model.safetensors.index.json" in _refusal(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(_file_bytes(GOOD, b"\0" * 8))
    assert "2 safetensors files without model.safetensors.index.json" in _refusal(tmp_path)


SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _write_shards(folder: Path, weight_map: Any) -> None:
    (folder / SHARD_1).write_bytes(_file_bytes({"a": _tensor([2], 0, 8)}, b"\0" * 8))
    (folder / SHARD_2).write_bytes(_file_bytes({"b": _tensor([3], 0, 12)}, b"\0" * 12))
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 20}, "weight_map": weight_map}))


def test_shards_with_a_true_index_pass(tmp_path: Path) -> None:
    _write_shards(tmp_path, {"a": SHARD_1, "b": SHARD_2})
    facts = check_weights(tmp_path)
    assert facts.files == (SHARD_1, SHARD_2)
    assert [tensor.name for tensor in facts.tensors] == ["a", "b"]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": SHARD_1}, f"does not name {SHARD_2}, which is there"),
        ({"a": SHARD_1, "b": SHARD_1}, f"does not name {SHARD_2}"),
        ({"a": SHARD_2, "b": SHARD_1}, f"places a in {SHARD_2}, it is in {SHARD_1}"),
        ({"a": SHARD_1, "b": SHARD_2, "c": SHARD_1}, f"places c in {SHARD_1}, it is in None"),
        ({"b": SHARD_2, "c": SHARD_1}, f"places a in None, it is in {SHARD_1}"),
        ({"a": SHARD_1, "b": "other.safetensors"}, "names other.safetensors, which is not there"),
        ({"a": SHARD_1, "b": "../other.safetensors"}, "places 'b' in '../other.safetensors'"),
        ({"a": SHARD_1, "b": "/etc/x.safetensors"}, "places 'b' in '/etc/x.safetensors'"),
        ({"a": SHARD_1, "b": "pytorch_model.bin"}, "places 'b' in 'pytorch_model.bin'"),
        ({"a": SHARD_1, "b": 7}, "places 'b' in 7"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_an_index_that_lies_is_refused(weight_map: Any, message: str, tmp_path: Path) -> None:
    _write_shards(tmp_path, weight_map)
    assert message in _refusal(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    _write_shards(tmp_path, {"a": SHARD_1, "b": SHARD_2})
    (tmp_path / SHARD_2).write_bytes(_file_bytes({"a": _tensor([2], 0, 8)}, b"\0" * 8))
    assert f"tensor a is also in {SHARD_1}" in _refusal(tmp_path)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_file_that_passes_with_one_byte_changed_is_read_alike_by_the_library(
    tmp_path: Path, position: int, value: int
) -> None:
    from safetensors import safe_open

    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3, np.int64)}, path)
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(content)
    try:
        facts = check_weights(tmp_path)
    except InvalidModel:
        return
    with safe_open(path, framework="np") as tensors:
        assert {tensor.name: list(tensor.shape) for tensor in facts.tensors} == {
            name: tensors.get_slice(name).get_shape()
            for name in tensors.keys()  # noqa: SIM118
        }


def test_checking_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(_file_bytes(GOOD, b"\0" * 8))
    code = "import sys, optimizer.models.files.check_weights as w; w.check_weights(sys.argv[1]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
