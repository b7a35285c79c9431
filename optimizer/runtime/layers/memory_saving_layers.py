"""Single layers that training runs with less memory than the models' own code."""

from collections.abc import Callable

from torch import nn

from optimizer.formats.stock_layers import are_layers_light
from optimizer.runtime.layers.capped_attention import lighten_capped_attention
from optimizer.runtime.layers.norms import lighten_norms


def lighten_layers(model: nn.Module) -> Callable[[], None]:
    """Norms and capped attention, unless the environment says otherwise; returns a function that ends it."""
    if not are_layers_light():
        return lambda: None
    undo_norms, undo_attention = lighten_norms(model), lighten_capped_attention(model)

    def undo() -> None:
        undo_attention()
        undo_norms()

    return undo
