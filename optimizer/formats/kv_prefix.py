"""Says which tokens keep hidden states in place of keys and values; the runtime does it and the estimator prices it. Torch-free.

A block's hidden state is ``h`` numbers for a token, its keys and values ``2 n d`` of ``n`` heads of ``d`` channels. States are
moved in place of keys and values only if they weigh less: with as many heads of keys as of queries they are half, with grouped
queries mostly more. They then also fit into the place of the same tokens' keys and values, and need no room of their own.
"""

from optimizer.base.errors import InvalidPlan
from optimizer.base.units import format_bytes

SHORTEST_PREFIX = 2
"""Fewest tokens of a prefix: a product of one row runs by other kernels."""


def can_rebuild(*, window: int | None, hidden_size: int, elements_per_token: int) -> bool:
    """Return true if a block's keys and values may be made again from hidden states: it has no sliding window, which drops the
    first tokens, and its hidden states are smaller.

    elements_per_token: of keys and values together, for each sequence.
    """
    return window is None and hidden_size < elements_per_token


def count_rebuilt(prefix_tokens: int, *, prompt_length: int) -> int:
    """Count the tokens that a block rebuilds, if it can. prefix_tokens: the plan's. prompt_length: of the prefill that all of a
    micro-batch's sequences share.
    """
    found = min(prefix_tokens, prompt_length)
    return found if found >= SHORTEST_PREFIX else 0


def prefix_refusal(prefix_tokens: int, *, has_windows: bool, state_bytes: int, token_bytes: int) -> InvalidPlan:
    """The error for a model none of whose blocks can rebuild. has_windows: true if all of them have a sliding window. Bytes are
    those of one token in one block.
    """
    if has_windows:
        why = "all blocks of this model have a sliding window, which drops the first tokens first"
    else:
        why = (
            f"a hidden state of this model weighs {format_bytes(state_bytes)}, a token's keys and values "
            f"{format_bytes(token_bytes)} a block, so nothing would be saved"
        )
    return InvalidPlan(
        f"plan.kv_cache.prefix_tokens is {prefix_tokens}; {why}: allowed is 0",
        field="plan.kv_cache.prefix_tokens",
        value=prefix_tokens,
        allowed=0,
    )
