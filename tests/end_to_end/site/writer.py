"""A tiny model with random weights, as the files of an upload: what generate jobs of the whole stack run."""

from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
}


def write_weights(folder: Path) -> Path:
    """model.safetensors in ``folder``."""
    import torch
    from safetensors.torch import save_file

    from optimizer.models.build import build_model
    from optimizer.models.spec import read_model_spec

    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(read_model_spec(CONFIG), dtype=torch.float32, device="cpu", seed=5)
    file = folder / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, file)
    return file
