"""Reads generation_config.json: how a model's makers want it sampled, and which tokens end an answer. Torch-free."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidModel
from optimizer.base.shown import shown_value
from optimizer.models.files.sidecars import GENERATION_FILE

_MAX_END_IDS = 64
_RANGES: dict[str, tuple[float, float]] = {"temperature": (0.0, 2.0), "top_k": (0, 1_000_000), "top_p": (0.0, 1.0)}


@dataclass(frozen=True, kw_only=True)
class GenerationFacts:
    """Settings of generation_config.json that are used; None where it leaves one out."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    end_ids: tuple[int, ...] = ()
    """Tokens that end an answer, beside the one that parts texts."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Defaults of a request, by the names of ``GenerationRequest``; empty where the likeliest token is taken."""
        named = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {name: value for name, value in named.items() if value is not None}


def read_generation_file(folder: str | Path) -> GenerationFacts:
    """From a folder's generation_config.json; all defaults where it has none. Raises InvalidModel."""
    file = Path(folder) / GENERATION_FILE
    if not file.is_file():
        return GenerationFacts()
    try:
        document = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        message = f"{GENERATION_FILE} is not JSON: {error}"
        raise InvalidModel(message, field="generation_config", allowed="a JSON object") from error
    return read_generation_config(document)


def read_generation_config(document: Any) -> GenerationFacts:
    """From the parsed file. Raises InvalidModel.

    Without ``do_sample`` nothing is drawn, as transformers has it; with it alone, and no number, nothing is said about how.
    """
    if not isinstance(document, dict):
        raise InvalidModel(f"{GENERATION_FILE} is not an object", field="generation_config", allowed="a JSON object")
    end_ids = _end_ids(document.get("eos_token_id"))
    if document.get("do_sample") is not True or all(document.get(name) is None for name in _RANGES):
        return GenerationFacts(end_ids=end_ids)
    return GenerationFacts(
        temperature=float(_number(document, "temperature", 1.0)),
        top_k=int(_number(document, "top_k", 50)),
        top_p=float(_number(document, "top_p", 1.0)) or None,
        end_ids=end_ids,
    )


def _number(document: dict[str, Any], name: str, default: float) -> float:
    """The default is transformers' own."""
    value = document.get(name)
    if value is None:
        return default
    low, high = _RANGES[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high:
        raise _refusal(name, value, allowed=f"a number from {low:g} to {high:,g}")
    return float(value)


def _end_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if len(ids) > _MAX_END_IDS or not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
        raise _refusal("eos_token_id", value, allowed=f"a token id, or at most {_MAX_END_IDS} of them")
    return tuple(dict.fromkeys(ids))


def _refusal(name: str, value: Any, *, allowed: str) -> InvalidModel:
    shown = shown_value(value)
    return InvalidModel(
        f"{name} of {GENERATION_FILE} is {shown!r:.80}; allowed: {allowed}",
        field=f"generation_config.{name}",
        value=shown,
        allowed=allowed,
    )
