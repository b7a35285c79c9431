"""Lists the files of a model's folder that belong to the model, as the service takes them; everything else stays where it is."""

import json
from pathlib import Path

from optimizer.models.files.sidecars import sidecar_files

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def model_files(folder: Path) -> list[Path]:
    """config.json, the files beside it and the weights, in this order. ``folder`` may be one GGUF file.

    Raises FileNotFoundError where there is neither a config.json nor a GGUF file.
    """
    if folder.is_file():
        return [folder]
    weights = _weights(folder)
    config = [path for path in (folder / "config.json",) if path.is_file()]
    if not config and not any(path.suffix == ".gguf" for path in weights):
        raise FileNotFoundError(f"{folder} holds no config.json")
    return [*config, *(folder / name for name in sidecar_files(folder)), *weights]


def seen_files(folder: Path) -> dict[str, list[int]]:
    """Size and time of change of the config and of the first weights: another machine's folder of the same name has others."""
    files = [path for path in model_files(folder) if path.name == "config.json" or is_weights(path)]
    states = {path.name: path.stat() for path in files[:2]}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in states.items()}


def is_weights(path: Path) -> bool:
    return path.suffix in (".safetensors", ".gguf")


def _weights(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        named = json.loads(index.read_bytes()).get("weight_map", {})
        return [*(folder / name for name in sorted(set(named.values())) if (folder / name).is_file()), index]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
