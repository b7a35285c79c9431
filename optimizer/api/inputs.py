"""Reads what the library's functions are given: a model as a config or a preset's name, a machine by its card's name,
files of JSON."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidInput, InvalidModel
from optimizer.goal import GenerationGoal, Goal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.joined import cards_of
from optimizer.hardware.machine import Machine
from optimizer.models.presets import PRESETS
from optimizer.models.spec import SUPPORTED_MODEL_TYPES, ModelSpec, read_model_spec

BEST = "best"
"""Asks for the fastest plan that fits, beside any baseline's label (``BASELINES``)."""
MAX_CONFIG_BYTES = 1_000_000
"""Largest config.json that is read."""
MAX_COMPARED = 6
"""Plans beside each other."""
Model = str | Path | Mapping[str, Any] | ModelSpec


def read_model(model: str | Path | Mapping[str, Any]) -> ModelSpec:
    """A preset's name, a config.json or the folder with one, or its content. Raises InvalidInput, InvalidModel."""
    config = read_config(model)
    return PRESETS[str(model)].spec if config is None else _read_spec(config)


def read_config(model: str | Path | Mapping[str, Any]) -> dict[str, Any] | None:
    """The config that ``read_model`` reads; None for a preset. Raises InvalidInput, InvalidModel."""
    if isinstance(model, Mapping):
        return dict(model)
    if not isinstance(model, str | Path):
        raise InvalidInput(
            f"model is {type(model).__name__}; allowed: a file's or a preset's name, or the content of a config.json",
            field="model",
            allowed="a name or an object",
        )
    if str(model) in PRESETS:
        return None
    path = Path(model)
    if not is_there(path):
        raise InvalidInput(
            f"model {str(model)!r} is neither a file nor a preset; presets: {', '.join(PRESETS)}",
            field="model",
            value=str(model),
            allowed=list(PRESETS),
        )
    document = read_json(path / "config.json" if path.is_dir() else path, field="model", max_bytes=MAX_CONFIG_BYTES)
    if not isinstance(document, dict):
        raise InvalidModel(f"{path} must hold one JSON object", field="model", value=str(path), allowed="a JSON object")
    return document


def _read_spec(document: dict[str, Any]) -> ModelSpec:
    """Read a config: a type on the allow-list without torch, any other that transformers knows with it."""
    if document.get("model_type") in (None, *SUPPORTED_MODEL_TYPES):
        return read_model_spec(document)
    # By name: what the service imports must not lead to transformers, and the service never comes here.
    spec: ModelSpec = import_module("optimizer.models.any_spec").read_any_spec(document)
    return spec


def known_machine(machine: str | Machine, *, num_devices: int = 1) -> Machine:
    """A card of the table by its name, so many of them, or cards of several kinds such as ``2x RTX 3060, RTX 4090``; a machine is
    itself. Cards of several machines need their links, which ``joined.cards_of`` takes. Raises InvalidInput.
    """
    if isinstance(machine, Machine):
        return machine
    return cards_of(machine) if "," in machine or "@" in machine else table_machine(machine, num_devices=num_devices)


def check_goal_devices(goal: Goal | GenerationGoal, machine: Machine) -> None:
    """Raise InvalidInput for more cards than the machine has, and for a generation in several machines. On the CPU device any
    number of processes play devices.
    """
    if machine.device.kind == "cuda" and goal.num_devices > machine.total_devices:
        raise InvalidInput(
            f"goal.num_devices is {goal.num_devices}; the machine has {machine.total_devices}",
            field="goal.num_devices",
            value=goal.num_devices,
            allowed={"minimum": 1, "maximum": machine.total_devices},
            hint="Ask for fewer, or for a machine with more: --devices with --gpu, Machine.num_devices.",
        )
    if isinstance(goal, GenerationGoal) and machine.hosts:
        raise InvalidInput(
            f"a generation is asked of devices in {machine.name}; generations run on the devices of one machine",
            field="devices",
            value=machine.name,
            allowed="devices of one machine",
        )


def check_one_device(goal: Goal | GenerationGoal) -> None:
    """Raise InvalidInput for a goal of several devices where plans of one are asked for."""
    if goal.num_devices > 1:
        raise InvalidInput(
            f"goal.num_devices is {goal.num_devices}; comparisons, rankings and estimates are of plans on one device",
            field="goal.num_devices",
            value=goal.num_devices,
            allowed=[1],
            hint="Ask for the best plan instead: headroom plan --devices.",
        )


def check_number_compared(number: int) -> None:
    """Raise InvalidInput for too few plans, or more than stand beside each other."""
    if not 2 <= number <= MAX_COMPARED:
        raise InvalidInput(
            f"{number} plans are to be compared; allowed: 2 to {MAX_COMPARED} different ones",
            field="compare",
            value=number,
            allowed={"minimum": 2, "maximum": MAX_COMPARED},
        )


def is_there(path: Path) -> bool:
    """Report whether anything lies there; False also for what can be no path."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, not permitted, with a NUL in it
        return False


def read_json(path: Path, *, field: str, max_bytes: int = 256_000_000) -> Any:
    """Raises InvalidInput that names the file where it cannot be read, is too large, or is no JSON."""
    try:
        return json.loads(read_text(path, field=field, max_bytes=max_bytes))
    except ValueError as error:
        raise _refuse(path, field, f" is not JSON: {error}") from error
    except RecursionError as error:
        raise _refuse(path, field, " is not JSON that can be read: it is nested too deeply") from error


def read_text(path: Path, *, field: str, max_bytes: int) -> str:
    """Raises InvalidInput that names the file where it cannot be read, is too large, or is no text."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise _refuse(path, field, " is no file")
        if path.stat().st_size > max_bytes:
            raise _refuse(path, field, f" has {path.stat().st_size:,} bytes; allowed: up to {max_bytes:,}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _refuse(path, field, f": {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _refuse(path, field, " cannot be read: it is no UTF-8 text") from error
    except ValueError as error:
        raise _refuse(path, field, f" cannot be read: {error}") from error


def _refuse(path: Path, field: str, why: str) -> InvalidInput:
    return InvalidInput(f"--{field} {path}{why}", field=field, value=str(path))
