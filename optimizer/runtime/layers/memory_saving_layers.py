"""Single layers that training runs with less memory than the models' own code."""

from collections.abc import Callable

from torch import nn

from optimizer.formats.stock_layers import uses_memory_saving_layers
from optimizer.runtime.layers.capped_attention import replace_capped_attention
from optimizer.runtime.layers.norms import replace_norms


def use_memory_saving_layers(model: nn.Module) -> Callable[[], None]:
    """Norms and capped attention, unless the environment says otherwise; returns a function that ends it."""
    if not uses_memory_saving_layers():
        return lambda: None
    undo_norms, undo_attention = replace_norms(model), replace_capped_attention(model)

    def undo() -> None:
        undo_attention()
        undo_norms()

    return undo
