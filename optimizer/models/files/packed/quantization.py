"""Reads how a checkpoint was packed from ``quantization_config`` of its config.json, by an allow-list. Torch-free.

bitsandbytes, GPTQ and AWQ are read; other methods are refused by their name. Sources: transformers' ``BitsAndBytesConfig``,
``GPTQConfig`` and ``AwqConfig``; GPTQModel's ``checkpoint_format``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from optimizer.base.errors import InvalidModel
from optimizer.base.shown import shown_value

Method = Literal["bitsandbytes", "gptq", "awq"]
METHODS: tuple[str, ...] = get_args(Method)
KEY = "quantization_config"
_BITS = {"gptq": (2, 4, 8), "awq": (4,)}
_FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Packing of a checkpoint's matrices."""

    method: Method
    bits: int = 4
    """Bits of an element; bitsandbytes says it tensor by tensor."""
    format: str = ""
    """Layout: ``gptq`` keeps each zero point less one, ``gptq_v2`` as it is; ``gemm`` of AWQ."""

    def to_config(self) -> dict[str, Any]:
        """``quantization_config`` with only what is read of it."""
        if self.method == "bitsandbytes":
            return {"quant_method": self.method}
        key = "checkpoint_format" if self.method == "gptq" else "version"
        return {"quant_method": self.method, "bits": self.bits, key: self.format}


def read_quantization(folder: str | Path) -> Quantization | None:
    """From the config.json of a folder; None where the weights are not packed, or it has none. Raises InvalidModel."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise InvalidModel(f"config.json is not JSON: {error}", field="config", allowed="a Hugging Face config.json") from error
    return find_quantization(config)


def find_quantization(config: Any) -> Quantization | None:
    """From a parsed config.json. Raises InvalidModel that names the method, bits or layout that cannot be read."""
    document = config.get(KEY) if isinstance(config, dict) else None
    if not document:
        return None
    if not isinstance(document, dict):
        raise _refusal(KEY, document, allowed="an object")
    method = document.get("quant_method") or ("bitsandbytes" if _is_bitsandbytes(document) else None)
    if method == "bitsandbytes":
        return Quantization(method="bitsandbytes")
    if method not in _BITS:
        raise _refusal(f"{KEY}.quant_method", method, allowed=", ".join(METHODS))
    bits = document.get("bits", document.get("w_bit", 4))
    if bits not in _BITS[method]:
        raise _refusal(f"{KEY}.bits", bits, allowed=" or ".join(map(str, _BITS[method])))
    key = "checkpoint_format" if method == "gptq" else "version"
    layout = str(document.get(key) or _FORMATS[method][0]).lower()
    if layout not in _FORMATS[method]:
        raise _refusal(f"{KEY}.{key}", layout, allowed=" or ".join(_FORMATS[method]))
    return Quantization(method=cast(Method, method), bits=bits, format=layout)


def _is_bitsandbytes(document: dict[str, Any]) -> bool:
    return bool(document.get("load_in_4bit") or document.get("load_in_8bit"))


def _refusal(field: str, value: Any, *, allowed: str) -> InvalidModel:
    shown = shown_value(value)
    return InvalidModel(
        f"{field} of config.json is {shown!r:.80}; allowed: {allowed}",
        field=field,
        value=shown,
        allowed=allowed,
        hint="Use the checkpoint that is not packed; Headroom packs it itself where a plan says so.",
    )
