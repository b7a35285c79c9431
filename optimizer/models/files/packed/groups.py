"""Finds in a checkpoint's headers which tensors are parts of one packed matrix. Torch-free; reads no numbers.

bitsandbytes 4-bit  ``weight`` beside ``weight.absmax``, ``weight.quant_map`` and ``weight.quant_state.bitsandbytes__nf4``
                    (or fp4), whose bytes are a JSON with the shape; with double quantization also ``nested_absmax``
                    and ``nested_quant_map``.
bitsandbytes 8-bit  ``weight`` in int8 beside ``SCB``, one scale for each row.
GPTQ, AWQ           ``qweight``, ``qzeros``, ``scales``, GPTQ also ``g_idx``: the group of each input.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from optimizer.base.errors import InvalidModel
from optimizer.models.files.check_weights import TensorFacts
from optimizer.models.files.packed.quantization import Quantization

_STATE = re.compile(r"(?P<weight>.*)\.quant_state\.bitsandbytes__(?P<packing>nf4|fp4)")
_FOUR_BIT_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_MAX_STATE_BYTES = 64 * 1024
_WORD_BITS = 32


@dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """One tensor of the model and the stored tensors that it is made of."""

    name: str
    """Its name in an unpacked checkpoint."""
    shape: tuple[int, ...]
    packing: str
    """``plain``, ``nf4``, ``fp4``, ``int8``, ``gptq`` or ``awq``."""
    parts: Mapping[str, str]
    """Names of stored tensors by role; a plain one has the role ``weight``."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers for unpacking: sizes of blocks, bits, offsets."""


def group_tensors(
    stored: Mapping[str, TensorFacts], *, quantization: Quantization | None, read_json: Callable[[str], Any]
) -> list[PackedTensor]:
    """Every tensor of the model, in the order of the first of its parts. Raises InvalidModel for parts that do not go together.

    read_json: the document kept as the bytes of a stored tensor.
    """
    packed = [*_four_bit(stored, read_json), *_eight_bit(stored), *_grouped(stored, quantization)]
    used = {name for tensor in packed for name in tensor.parts.values()}
    used |= {f"{tensor.name.removesuffix('.weight')}.weight_format" for tensor in packed if tensor.packing == "int8"}
    plain = [
        PackedTensor(name=name, shape=facts.shape, packing="plain", parts={"weight": name})
        for name, facts in stored.items()
        if name not in used
    ]
    places = {name: place for place, name in enumerate(stored)}
    return sorted([*packed, *plain], key=lambda tensor: min(places[name] for name in tensor.parts.values()))


def _four_bit(stored: Mapping[str, TensorFacts], read_json: Callable[[str], Any]) -> Iterator[PackedTensor]:
    for state_name in stored:
        match = _STATE.fullmatch(state_name)
        if match is None:
            continue
        name = match["weight"]
        parts = {role: f"{name}.{role}" for role in _FOUR_BIT_PARTS if f"{name}.{role}" in stored}
        parts = {"weight": name, **parts, "state": state_name}
        _require(name, parts, stored, roles=("weight", "absmax", "quant_map"))
        if stored[state_name].num_bytes > _MAX_STATE_BYTES:
            raise _invalid(name, "a quant_state that is too long", allowed=f"at most {_MAX_STATE_BYTES:,} bytes")
        facts = _four_bit_facts(name, read_json(state_name), is_nested="nested_absmax" in parts)
        num_bytes = stored[name].num_bytes
        num_elements = prod(facts["shape"])
        if num_bytes != (num_elements + 1) // 2:
            raise _invalid(name, f"{num_bytes:,} bytes", allowed=f"{(num_elements + 1) // 2:,} for shape {facts['shape']}")
        num_blocks = -(-num_elements // facts["block_elements"])
        if stored[parts["absmax"]].shape != (num_blocks,) or stored[parts["quant_map"]].shape != (16,):
            raise _invalid(name, "scales of another size", allowed=f"{num_blocks:,} scales and a map of 16 values")
        yield PackedTensor(name=name, shape=facts["shape"], packing=match["packing"], parts=parts, facts=facts)


def _four_bit_facts(name: str, state: Any, *, is_nested: bool) -> dict[str, Any]:
    """Read of the quant_state what unpacking needs; ``dtype`` is that of the products, which the plan decides."""
    try:
        shape = tuple(int(size) for size in state["shape"])
        facts: dict[str, Any] = {"shape": shape, "block_elements": int(state["blocksize"])}
        if is_nested:
            facts |= {"nested_block_elements": int(state["nested_blocksize"]), "offset": float(state["nested_offset"])}
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid(name, f"an unreadable quant_state ({error!r:.80})", allowed="shape and blocksize") from error
    sizes = [*shape, facts["block_elements"], facts.get("nested_block_elements", 1)]
    if not shape or min(sizes) < 1 or prod(shape) >= 2**40:
        raise _invalid(name, f"a quant_state with sizes {sizes!r:.80}", allowed="sizes from 1")
    return facts


def _eight_bit(stored: Mapping[str, TensorFacts]) -> Iterator[PackedTensor]:
    for scales_name, scales in stored.items():
        if not scales_name.endswith(".SCB"):
            continue
        name = f"{scales_name.removesuffix('SCB')}weight"
        weight = stored.get(name)
        if weight is None or weight.dtype != "I8" or len(weight.shape) != 2 or scales.shape != weight.shape[:1]:
            raise _invalid(scales_name, "scales without their int8 matrix", allowed=f"{name} with a row for each")
        yield PackedTensor(name=name, shape=weight.shape, packing="int8", parts={"weight": name, "scales": scales_name})


def _grouped(stored: Mapping[str, TensorFacts], quantization: Quantization | None) -> Iterator[PackedTensor]:
    for packed_name in stored:
        if not packed_name.endswith(".qweight"):
            continue
        base = packed_name.removesuffix(".qweight")
        if quantization is None or quantization.method == "bitsandbytes":
            allowed = "quantization_config in config.json with quant_method gptq or awq"
            raise _invalid(packed_name, "a packed matrix, and nothing that says how it was packed", allowed=allowed)
        parts = {role: f"{base}.{role}" for role in ("qweight", "qzeros", "scales", "g_idx") if f"{base}.{role}" in stored}
        _require(base, parts, stored, roles=("qweight", "qzeros", "scales"))
        yield _grouped_tensor(base, parts, {role: stored[name].shape for role, name in parts.items()}, quantization)


def _grouped_tensor(
    base: str, parts: dict[str, str], shapes: Mapping[str, tuple[int, ...]], quantization: Quantization
) -> PackedTensor:
    per_word = _WORD_BITS // quantization.bits
    if any(len(shapes[role]) != 2 for role in ("qweight", "qzeros", "scales")):
        raise _invalid(base, "packed parts that are no matrices", allowed="matrices")
    num_groups, num_outputs = shapes["scales"]
    if quantization.method == "gptq":
        num_inputs = shapes["qweight"][0] * per_word
        expected: dict[str, tuple[int, ...]] = {"qweight": (num_inputs // per_word, num_outputs)}
        if "g_idx" in parts:
            expected["g_idx"] = (num_inputs,)
    else:
        num_inputs = shapes["qweight"][0]
        expected = {"qweight": (num_inputs, num_outputs // per_word)}
        parts.pop("g_idx", None)
    expected["qzeros"] = (num_groups, num_outputs // per_word)
    wrong = [f"{role} {shapes[role]}" for role, shape in expected.items() if shapes[role] != shape]
    if wrong or num_groups < 1 or num_outputs % per_word or (num_inputs % num_groups and "g_idx" not in parts):
        allowed = f"{expected} for {quantization.bits} bits and scales {shapes['scales']}"
        raise _invalid(base, f"packed parts of other sizes: {', '.join(wrong) or 'groups'}", allowed=allowed)
    return PackedTensor(
        name=f"{base}.weight",
        shape=(num_outputs, num_inputs),
        packing=quantization.method,
        parts=parts,
        facts={"bits": quantization.bits, "adds_one": quantization.format == "gptq"},
    )


def _require(name: str, parts: Mapping[str, str], stored: Mapping[str, TensorFacts], *, roles: tuple[str, ...]) -> None:
    absent = [role for role in roles if parts.get(role) not in stored]
    if absent:
        raise _invalid(name, f"a packed matrix without its {', '.join(absent)}", allowed=", ".join(roles))


def _invalid(name: str, found: str, *, allowed: str) -> InvalidModel:
    return InvalidModel(f"tensor {name}: {found}; allowed: {allowed}", field=f"weights.{name}", value=found, allowed=allowed)
