"""Low-rank adapters of finished runs beside one served model, switched by row.

The model's matrices stay as they are. A hook on each matrix that some adapter changes adds, to the rows that ask for it, what
peft's layer would: ``B (A x)`` times its scale, row by row, so that no row's sum depends on another's. A held adapter costs its
own bytes alone.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from optimizer.base.errors import InvalidModel
from optimizer.runtime.meter.meter import Meter

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """One matrix's adapter: two factors and the scale of their product."""

    low: torch.Tensor
    high: torch.Tensor
    scale: float


class AdapterShelf:
    """Adapters by name, for one model on one device."""

    def __init__(self, model: nn.Module, *, device: torch.device, meter: Meter | None = None) -> None:
        self._dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        self._modules = dict(model.named_modules())
        self._device = device
        self._meter = meter
        self._pairs: dict[str, dict[str, _Pair]] = {}
        self._hooked: set[str] = set()
        self._by_row: Sequence[str] = ()

    def __contains__(self, name: str) -> bool:
        return not name or name in self._pairs

    def load(self, name: str, folder: Path) -> None:
        """Hold the adapter that a run left in ``folder``, in peft's form.

        Raises InvalidModel for one that is not of this model, or whose effect cannot be switched by row.
        """
        config = json.loads((folder / "adapter_config.json").read_bytes())
        if unknown := _unknown_settings(config):
            raise _refused(f"sets {unknown}", "a plain LoRA adapter of matrices")
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        factors: dict[str, dict[str, torch.Tensor]] = {}
        for tensor_name, tensor in load_file(folder / "adapter_model.safetensors").items():
            match = _TENSOR.fullmatch(tensor_name)
            if match is None or match["module"] not in self._modules:
                raise _refused(f"holds {tensor_name}, which this model does not have", "the adapter of a run on this model")
            factors.setdefault(match["module"], {})[match["factor"]] = tensor
        self._pairs[name] = {path: self._pair(path, found, scale=scale) for path, found in factors.items()}
        for path in factors:
            self._hook(path)

    def drop(self, name: str) -> None:
        self._pairs.pop(name, None)

    def num_bytes(self, name: str) -> int:
        pairs = self._pairs.get(name, {}).values()
        return sum(tensor.numel() * tensor.element_size() for pair in pairs for tensor in (pair.low, pair.high))

    @contextmanager
    def switched(self, by_row: Sequence[str]) -> Iterator[None]:
        """Have each row of the batch go through its own adapter; empty for none."""
        self._by_row = by_row if any(by_row) else ()
        try:
            yield
        finally:
            self._by_row = ()

    def _pair(self, path: str, found: dict[str, torch.Tensor], *, scale: float) -> _Pair:
        if set(found) != {"A", "B"}:
            raise _refused(f"has no whole pair for {path}", "two factors for each matrix")
        low, high = (found[factor].to(device=self._device, dtype=self._dtype, copy=True) for factor in "AB")
        if self._meter is not None:
            for tensor in (low, high):
                self._meter.assign(tensor, "weights")
        return _Pair(low=low, high=high, scale=scale)

    def _hook(self, path: str) -> None:
        if path in self._hooked:
            return
        self._hooked.add(path)

        def add(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            return self._add(path, args[0], output)

        self._modules[path].register_forward_hook(add)

    def _add(self, path: str, states: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
        changed = [(row, pair) for row, name in enumerate(self._by_row) if (pair := self._pairs.get(name, {}).get(path))]
        if not changed:
            return None
        if len(states) != len(self._by_row):
            raise _refused(f"changes {path}, which sees rows of several sequences at once", "adapters outside the experts")
        for row, pair in changed:
            narrow = states[row].to(pair.low.dtype) @ pair.low.t()
            output[row] += (narrow @ pair.high.t()).mul_(pair.scale).to(output.dtype)
        return output


def _unknown_settings(config: dict[str, Any]) -> str:
    """The traits that cannot be switched by row; empty for a plain adapter."""
    if config.get("peft_type", "LORA") != "LORA":
        return f"peft_type {config['peft_type']}"
    special = ("target_parameters", "modules_to_save", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias")
    return ", ".join(name for name in special if config.get(name))


def _refused(found: str, allowed: str) -> InvalidModel:
    return InvalidModel(
        f"the adapter {found}; it cannot be switched on beside others; allowed: {allowed}",
        field="adapter",
        value=found,
        allowed=allowed,
        hint="Make the run's merged weights a model of their own, and ask for that.",
    )
