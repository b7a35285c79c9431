"""The optimizers that a training job can ask for: what each is called, and what its update keeps, moves and allows. Torch-free.

Each is declared once; the workload, forms, commands, the estimator and the list of what cannot go together read it here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

OptimizerName = Literal["adamw", "sgd", "lion", "adafactor"]
UpdateRate = Literal["adamw_32", "adamw_8", "sgd_momentum", "sgd", "lion", "adafactor"]
"""Rates of updates that a machine may have measured: an optimizer, with the bits of its state where they differ."""


@dataclass(frozen=True, kw_only=True)
class OptimizerDeclaration:
    """One update rule."""

    name: OptimizerName
    label: str
    """Its name as people write it."""
    keeps: str
    """Its state for each weight between steps, in words for the terminal and the glossary."""
    describes: Mapping[int, str]
    """By the moments it keeps, what it keeps, for the reason beside a prediction."""
    rate_names: Mapping[int, UpdateRate]
    """By the moments it keeps, the rate of its update in ``Rates.optimizer_elements_per_s``."""
    update_bytes: Mapping[int, int]
    """The same for the bytes that an update moves for each element, of fp32 weights."""
    counts_steps: bool = False
    """True if each tensor has a count of its updates, of 4 bytes."""
    has_8_bits: bool = False
    """True if its moments may be kept in 8 bits."""
    leaves_device: bool = True
    """True if its state may leave the device, and its update run on the host in pieces."""
    is_factored: bool = False
    """True if it keeps sums over a matrix's rows and columns in place of a number for each element."""
    steps_alone: bool = False
    """True if tensors are updated one by one, whatever the plan."""
    updates_rows: bool = False
    """True if it can update single rows of an embedding."""


_DECLARED: Final = (
    OptimizerDeclaration(
        name="adamw",
        label="AdamW",
        keeps="two numbers of state for each weight",
        describes={2: "two moments"},
        rate_names={2: "adamw_32"},
        update_bytes={2: 28},
        counts_steps=True,
        has_8_bits=True,
        updates_rows=True,
    ),
    OptimizerDeclaration(
        name="sgd",
        label="SGD",
        keeps="one, or none without momentum",
        describes={1: "one moment", 0: "no moments"},
        rate_names={1: "sgd_momentum", 0: "sgd"},
        update_bytes={1: 20, 0: 12},
    ),
    OptimizerDeclaration(
        name="lion",
        label="Lion",
        keeps="one number for each weight",
        describes={1: "one moment"},
        rate_names={1: "lion"},
        # Five passes by plain kernels: mixing 12, signs 8, decay 8, the update 12, the moment 12.
        update_bytes={1: 52},
    ),
    OptimizerDeclaration(
        name="adafactor",
        label="Adafactor",
        keeps="a number for each row and column of a matrix",
        describes={0: "sums over the rows and columns"},
        rate_names={0: "adafactor"},
        # Passes by plain kernels: two norms and two sums of squares 16, decay 8, the outer product 4, its three changes 24, the
        # gradient's share 12, the update 12.
        update_bytes={0: 76},
        counts_steps=True,
        leaves_device=False,
        is_factored=True,
        steps_alone=True,
    ),
)
OPTIMIZERS: Final[dict[OptimizerName, OptimizerDeclaration]] = {declared.name: declared for declared in _DECLARED}
OPTIMIZER_NAMES: Final[tuple[OptimizerName, ...]] = get_args(OptimizerName)


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """The state that one run's optimizer keeps of each trained tensor, whatever the plan makes of it."""

    optimizer: OptimizerName
    num_moments: int
    """Numbers for each element, each as large as the tensor."""

    @property
    def declared(self) -> OptimizerDeclaration:
        return OPTIMIZERS[self.optimizer]

    @property
    def counts_steps(self) -> bool:
        return self.declared.counts_steps

    @property
    def rate_name(self) -> UpdateRate:
        return self.declared.rate_names[self.num_moments]

    @property
    def update_bytes(self) -> int:
        """Bytes that an update of one fp32 element moves: weight, gradient and state read, all but the gradient written."""
        return self.declared.update_bytes[self.num_moments]


ADAMW: Final = KeptState(optimizer="adamw", num_moments=2)
"""The state by whose update every machine's rates are known."""
