"""Of which tokens hidden states are kept in place of keys and values: what the runtime does and the estimator prices. Torch-free.

A block's hidden state is ``h`` numbers for a token, its keys and values ``2 n d`` of ``n`` heads of ``d`` channels. States are
moved in place of keys and values only where they weigh less: with as many heads of keys as of queries they are half, with
grouped queries mostly more. Then they also fit where keys and values of the same tokens will be, and need no room of their own.
"""

from optimizer.base.errors import InvalidPlan
from optimizer.base.units import format_bytes

SHORTEST_PREFIX = 2
"""A product of one row runs by other kernels."""


def can_rebuild(*, window: int | None, hidden_size: int, elements_per_token: int) -> bool:
    """Whether keys and values of a block may be made again. elements_per_token: of both, for each sequence.

    Of a window the first tokens are the ones that go.
    """
    return window is None and hidden_size < elements_per_token


def count_rebuilt(prefix_tokens: int, *, prompt_length: int) -> int:
    """In a block that can. prefix_tokens: the plan's. prompt_length: of the prefill that a micro-batch has in common."""
    found = min(prefix_tokens, prompt_length)
    return found if found >= SHORTEST_PREFIX else 0


def refusal(prefix_tokens: int, *, has_windows: bool, state_bytes: int, token_bytes: int) -> InvalidPlan:
    """Of a model none of whose blocks can. has_windows: whether all of them have one. Bytes are of one token in one block."""
    if has_windows:
        why = "all blocks of this model have a sliding window, which drops the first tokens first"
    else:
        why = (
            f"a hidden state of this model weighs {format_bytes(state_bytes)}, a token's keys and values "
            f"{format_bytes(token_bytes)} a block, so that nothing would be saved"
        )
    return InvalidPlan(
        f"plan.kv_cache.prefix_tokens is {prefix_tokens}; {why}: allowed is 0",
        field="plan.kv_cache.prefix_tokens",
        value=prefix_tokens,
        allowed=0,
    )
