"""GPTQ and AWQ checkpoints, packed here word by word as their papers' code does, are unpacked to the same numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from optimizer.base.errors import InvalidModel
from optimizer.models.files.readers import tensor_readers

INPUTS, OUTPUTS, GROUP = 64, 48, 16
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def word(values: list[int], bits: int) -> int:
    """Values into 32 bits, the first lowest, as a signed number."""
    made = sum(value << (bits * place) for place, value in enumerate(values))
    return made - 2**32 if made >= 2**31 else made


def config(folder: Path, **quantization: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))


def numbers(bits: int, num_groups: int, *, largest_zero: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values [inputs, outputs], zeros and scales [groups, outputs]."""
    generator = torch.Generator().manual_seed(bits)
    values = torch.randint(0, 2**bits, (INPUTS, OUTPUTS), generator=generator)
    zeros = torch.randint(1, largest_zero + 1, (num_groups, OUTPUTS), generator=generator)
    return values, zeros, torch.rand((num_groups, OUTPUTS), generator=generator).to(torch.float16)


def expected(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: list[int]) -> torch.Tensor:
    rows = [(values[row] - zeros[group]).float() * scales[group].float() for row, group in enumerate(groups)]
    return torch.stack(rows).t()


def pack_gptq(values: torch.Tensor, zeros: torch.Tensor, bits: int, *, less: int) -> dict[str, torch.Tensor]:
    n = 32 // bits
    qweight = [
        [word(values[row : row + n, column].tolist(), bits) for column in range(OUTPUTS)] for row in range(0, INPUTS, n)
    ]
    qzeros = [[word((zero[c : c + n] - less).tolist(), bits) for c in range(0, OUTPUTS, n)] for zero in zeros]
    return {"a.qweight": torch.tensor(qweight, dtype=torch.int32), "a.qzeros": torch.tensor(qzeros, dtype=torch.int32)}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("by_activation", [False, True])
def test_gptq_is_unpacked(tmp_path: Path, bits: int, layout: str, by_activation: bool) -> None:
    groups = [row // GROUP for row in range(INPUTS)]
    if by_activation:
        groups = groups[::3] + groups[1::3] + groups[2::3]
    less = int(layout == "gptq")
    values, zeros, scales = numbers(bits, INPUTS // GROUP, largest_zero=2**bits - 1 + less)
    tensors = {**pack_gptq(values, zeros, bits, less=less), "a.scales": scales, "a.bias": torch.ones(OUTPUTS)}
    tensors["a.g_idx"] = torch.tensor(groups, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    config(tmp_path, quant_method="gptq", bits=bits, checkpoint_format=layout)
    readers = {reader.name: reader for reader in tensor_readers(tmp_path)}
    assert set(readers) == {"a.weight", "a.bias"}
    assert (readers["a.weight"].shape, readers["a.weight"].packing) == ((OUTPUTS, INPUTS), "gptq")
    assert torch.equal(readers["a.weight"].read(), expected(values, zeros, scales, groups))


def test_awq_is_unpacked(tmp_path: Path) -> None:
    values, zeros, scales = numbers(4, INPUTS // GROUP, largest_zero=15)

    def pack(matrix: torch.Tensor) -> torch.Tensor:
        rows = [[word([int(row[c + i]) for i in AWQ_ORDER], 4) for c in range(0, OUTPUTS, 8)] for row in matrix]
        return torch.tensor(rows, dtype=torch.int32)

    save_file({"a.qweight": pack(values), "a.qzeros": pack(zeros), "a.scales": scales}, tmp_path / "model.safetensors")
    config(tmp_path, quant_method="awq", bits=4, group_size=GROUP, version="gemm")
    (reader,) = tensor_readers(tmp_path)
    assert torch.equal(reader.read(), expected(values, zeros, scales, [row // GROUP for row in range(INPUTS)]))


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ({"quant_method": "aqlm"}, "quantization_config.quant_method of config.json is 'aqlm'; allowed: bitsandbytes, gptq, awq"),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits of config.json is 3; allowed: 2 or 4 or 8"),
        ({"quant_method": "awq", "version": "gemv"}, "quantization_config.version of config.json is 'gemv'; allowed: gemm"),
        ([1], "quantization_config of config.json is .*; allowed: an object"),
        ({}, "a packed matrix, and nothing that says how it was packed"),
        ({"quant_method": "awq"}, "packed parts of other sizes"),
    ],
)
def test_what_cannot_be_unpacked_is_refused_in_words(tmp_path: Path, quantization: Any, text: str) -> None:
    values, zeros, scales = numbers(4, 4, largest_zero=15)
    save_file({**pack_gptq(values, zeros, 4, less=1), "a.scales": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(InvalidModel, match=text):
        tensor_readers(tmp_path)


def test_a_group_that_is_not_there_is_refused(tmp_path: Path) -> None:
    values, zeros, scales = numbers(4, 4, largest_zero=15)
    groups = torch.full((INPUTS,), 9, dtype=torch.int32)
    tensors = {**pack_gptq(values, zeros, 4, less=1), "a.scales": scales, "a.g_idx": groups}
    save_file(tensors, tmp_path / "model.safetensors")
    config(tmp_path, quant_method="gptq", bits=4)
    (reader,) = tensor_readers(tmp_path)
    with pytest.raises(InvalidModel, match="g_idx names group 9; allowed: 0 to 3"):
        reader.read()
