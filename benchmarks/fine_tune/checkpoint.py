"""Makes a checkpoint of random weights as a hub holds it: config.json, a tokenizer, sharded safetensors in bf16."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from optimizer.data.bundled import TOKENIZER_FILE
from optimizer.models.build import build_unfilled
from optimizer.models.files.tensor_files import TensorEntry, write_tensors
from optimizer.models.spec import read_model_spec

SHARD_BYTES = 5_000_000_000
_DRAWN_ELEMENTS = 1 << 22
"""Numbers that are drawn for a tensor, and repeated: drawing billions would take longer than all that is measured."""
_SCALE = 0.02


def make_checkpoint(folder: Path, config: dict[str, Any], *, seed: int) -> int:
    """Bytes of the weights. One tensor in memory at a time."""
    spec = read_model_spec(config)
    model = build_unfilled(spec, dtype=torch.bfloat16)
    entries = [
        TensorEntry(
            name=name,
            shape=tuple(parameter.shape),
            dtype=torch.bfloat16,
            read=partial(_draw, tuple(parameter.shape), seed=seed + index),
        )
        for index, (name, parameter) in enumerate(model.named_parameters())
    ]
    folder.mkdir(parents=True)
    write_tensors(entries, folder=folder, max_shard_bytes=SHARD_BYTES)
    (folder / "config.json").write_text(json.dumps({**spec.to_config(), "dtype": "bfloat16"}))
    shutil.copyfile(TOKENIZER_FILE, folder / "tokenizer.json")
    return sum(entry.num_bytes for entry in entries)


def _draw(shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    num_elements = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(min(num_elements, _DRAWN_ELEMENTS), generator=generator).mul_(_SCALE).to(torch.bfloat16)
    return drawn.repeat(-(-num_elements // drawn.numel()))[:num_elements].view(shape)
