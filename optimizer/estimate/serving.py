"""Predicts what holding a model for many askers takes on a device: weights, keys and values at their limit, and one pass.

A sum of three parts that are there together. Weights and keys and values follow from the config; for what a prompt's pass holds
besides (``_ACTIVATION_WIDTHS``) the widest moment of a block is taken, which is a bound for the fused attention that models run
with. *Not modelled*: kernels' own scratch, attention without a fused kernel, and what loading takes while matrices are converted
or packed, which is held against the same budget (``runtime/serving/opening.py``).
"""

from dataclasses import dataclass
from typing import Any, Final

from optimizer.base.errors import InvalidInput
from optimizer.base.units import format_bytes
from optimizer.models.spec import ModelSpec
from optimizer.plan.weights import DTYPE_BYTES, PACKED_SIZES, FrozenFormat, WeightsDtype

DEFAULT_CONTEXT_TOKENS: Final = 8192
SMALLEST_CONTEXT_TOKENS: Final = 128
DEFAULT_ROWS: Final = 8
MAX_ROWS: Final = 64
_DTYPES: dict[str, WeightsDtype] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_HIDDEN_WIDTHS: Final = 4
"""Hidden states of a block at its widest moment: the stream, its norm, and two that are on their way."""
_FFN_WIDTHS: Final = 3
"""The gate, what is multiplied with it, and their product."""
_FP32_BYTES: Final = 4
_SPARE: Final = 1.02


@dataclass(frozen=True, kw_only=True)
class ServingNeed:
    """Bytes on the device."""

    weights_bytes: int
    kv_bytes_per_token: int
    context_tokens: int
    """Longest prompt and answer together."""
    num_rows: int
    workspace_bytes: int
    """Activations of the longest prompt's pass, and the logits of all rows."""
    kv_limit_bytes: int
    """For keys and values of all that run."""

    @property
    def peak_bytes(self) -> int:
        return self.weights_bytes + self.kv_limit_bytes + self.workspace_bytes

    def to_json(self) -> dict[str, Any]:
        """The form in which a job keeps its prediction."""
        return {
            "device_peak_bytes": self.peak_bytes,
            "device_peak_low_bytes": self.weights_bytes,
            "device_peak_high_bytes": self.peak_bytes,
            "device_bytes_by_category": {
                "weights": self.weights_bytes,
                "kv_cache": self.kv_limit_bytes,
                "activations": self.workspace_bytes,
            },
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "context_tokens": self.context_tokens,
            "num_rows": self.num_rows,
        }


def serving_dtype(spec: ModelSpec) -> WeightsDtype:
    """fp32, bf16 or fp16: what the config names."""
    return _DTYPES.get(str(spec.config.get("dtype")), "fp32")


def predict_serving(
    spec: ModelSpec,
    *,
    budget_bytes: int | None,
    num_rows: int = DEFAULT_ROWS,
    context_tokens: int | None = None,
    frozen: FrozenFormat = "same",
) -> ServingNeed:
    """The bytes that a model takes that is held for ``num_rows`` askers at once.

    budget_bytes: None for what all rows take at the whole context. context_tokens: None for the model's own length, at most
    8,192, halved until one request of that length fits. Raises InvalidInput where the budget holds not even that.
    """
    longest = min(spec.max_sequence_length, DEFAULT_CONTEXT_TOKENS) if context_tokens is None else context_tokens
    while True:
        need = _need(spec, num_rows=num_rows, context_tokens=longest, frozen=frozen)
        one_row = need.weights_bytes + need.workspace_bytes + longest * need.kv_bytes_per_token
        if budget_bytes is None or one_row <= budget_bytes:
            break
        if context_tokens is not None or longest // 2 < SMALLEST_CONTEXT_TOKENS:
            raise _too_small(budget_bytes, one_row, need, longest)
        longest //= 2
    if budget_bytes is None or need.peak_bytes <= budget_bytes:
        return need
    left = budget_bytes - need.weights_bytes - need.workspace_bytes
    return ServingNeed(**{**need.__dict__, "kv_limit_bytes": left})


def _need(spec: ModelSpec, *, num_rows: int, context_tokens: int, frozen: FrozenFormat) -> ServingNeed:
    element = DTYPE_BYTES[serving_dtype(spec)]
    per_token = _kv_width(spec) * element * spec.num_blocks
    hidden, inner = spec.hidden_size, _inner_size(spec)
    activations = context_tokens * (_HIDDEN_WIDTHS * hidden + max(_FFN_WIDTHS * inner, 3 * hidden)) * element
    activations += context_tokens * hidden * _FP32_BYTES  # a norm's fp32 copy
    logits = num_rows * spec.vocab_size * (element + 3 * _FP32_BYTES)
    return ServingNeed(
        weights_bytes=_weights_bytes(spec, element=element, frozen=frozen),
        kv_bytes_per_token=per_token,
        context_tokens=context_tokens,
        num_rows=num_rows,
        workspace_bytes=int((activations + logits) * _SPARE),
        kv_limit_bytes=num_rows * context_tokens * per_token,
    )


def _weights_bytes(spec: ModelSpec, *, element: int, frozen: FrozenFormat) -> int:
    if frozen == "same":
        return spec.num_parameters * element
    outside = spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)
    inside = max(0, spec.num_parameters - outside)
    rows = -(-inside // spec.hidden_size)
    return outside * element + PACKED_SIZES[frozen].count_bytes(inside, num_rows=rows, bytes_per_element=element)


def _kv_width(spec: ModelSpec) -> int:
    """Channels of a token's keys and values in one block; those of all heads where the config names no fewer."""
    config = spec.config
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    kv_heads = int(config.get("num_key_value_heads") or (1 if config.get("multi_query") else heads))
    head_dim = int(config.get("head_dim") or spec.hidden_size // heads)
    return 2 * kv_heads * head_dim


def _inner_size(spec: ModelSpec) -> int:
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    found = [int(spec.config[name]) for name in names if spec.config.get(name)]
    return found[0] if found else 4 * spec.hidden_size


def _too_small(budget_bytes: int, needed_bytes: int, need: ServingNeed, tokens: int) -> InvalidInput:
    return InvalidInput(
        f"holding the model takes {format_bytes(needed_bytes)} for one conversation of {tokens:,} tokens (weights "
        f"{format_bytes(need.weights_bytes)}, keys and values {format_bytes(tokens * need.kv_bytes_per_token)}, one pass "
        f"{format_bytes(need.workspace_bytes)}); the budget is {format_bytes(budget_bytes)}",
        field="device_budget_bytes",
        value=budget_bytes,
        allowed={"minimum": needed_bytes},
        hint="Raise the budget, or hold packed weights: int8, int4 or nf4.",
    )
