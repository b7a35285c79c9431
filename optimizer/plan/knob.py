"""Declarations of a module of the plan beside its fields: its decisions (``Knob``) and the techniques that they use.

``techniques.py`` gathers what all modules declare. Forms, pins, the glossary, ``--forbid``, the searches' neighbours and the
tables of docs/techniques.md read it from there, so none of them lists a technique by itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from optimizer.base.categories import Category

Work = Literal["training", "generation"]
LossKind = Literal["none", "rounding", "any"]
"""Effect of a technique on the numbers: not at all, as 16-bit training rounds them, or in a way that depends on the model."""
Group = Literal[
    "Activations",
    "Batch and loss",
    "Gradients, optimizer state and weights",
    "Number formats",
    "Kernels",
    "Several devices",
    "Keys and values of generations",
    "Places",
]
"""Headings under which people find a technique."""
Asks = Callable[[Any], bool]
"""Says of a knob's value whether it asks for something."""


@dataclass(frozen=True, kw_only=True)
class TechniqueDeclaration:
    """One way of saving memory that a goal may forbid."""

    name: str
    """Its name in ``goal.forbid``, in JSON and in the terminal."""
    label: str
    """A few words, for a box on a form and for messages."""
    sentence: str
    """The sentence of the glossary and of docs/techniques.md: what it does and what that costs."""
    group: Group
    searches: tuple[Work, ...] = ("training",)
    """The kinds of work whose plans can use it and whose search tries it."""
    loss: LossKind = "none"
    explanation: str = ""
    """Sentence of a plan's explanation where it is used, if that depends on nothing else in the plan."""
    lowers: tuple[Category, ...] = ()
    """The categories of memory that it makes smaller, where a page offers it as their lever."""
    num_devices: int = 1
    """Fewest devices of a machine on which a plan can use it; forms for fewer leave it out."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """Values of a knob that use a technique."""

    technique: str
    asks: Asks
    where: "tuple[Condition, ...]" = ()
    """All must hold, beside those of the knob."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """Values of a knob that need a package which is not always installed."""

    name: str
    asks: Asks


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A value of another knob without which a knob decides nothing."""

    path: str
    holds: Asks


@dataclass(frozen=True, kw_only=True)
class Face:
    """The words with which one kind of work shows a knob."""

    label: str
    help: str = ""
    change: str = ""
    """A change to a value, as a template of ``{value}`` and ``{before}``: ``frozen weights in {value}``."""
    changes: Mapping[Any, str] = field(default_factory=dict)
    """The same of values that have words of their own."""

    def describe(self, value: Any, *, before: Any) -> str:
        """Words for a change from one value to another; empty where none are declared."""
        return self.changes.get(value, self.change).format(value=value, before=before)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One decision of a plan."""

    path: str
    """Its place in the plan: ``optimizer_state.bits``."""
    plain: Any
    """Its value in plain training or generation."""
    words: Mapping[Any, str] = field(default_factory=dict)
    """A page's words for values that do not speak for themselves."""
    uses: tuple[Use, ...] = ()
    packages: tuple[Package, ...] = ()
    brings: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)
    """By value, other knobs' values that it cannot do without; a change to it makes these changes too."""
    matters_where: tuple[Condition, ...] = ()
    """All must hold for the knob to decide anything."""
    or_where: tuple[Condition, ...] = ()
    """Any of these is enough, in plans that have its category."""
    num_devices: int = 1
    """Fewest devices of a machine on which it decides anything; forms for fewer leave it out."""
    training: Face | None = None
    """None where plans of training do not have it."""
    generation: Face | None = None

    def technique_of(self, value: Any) -> str | None:
        """The technique to which a change to this value belongs: the one it uses, or of the plain value the first it ends."""
        return next((use.technique for use in (*(use for use in self.uses if use.asks(value)), *self.uses)), None)


def equals(value: Any) -> Asks:
    """Asks where a knob has this value."""
    return lambda found: bool(found == value)


def differs(value: Any) -> Asks:
    """Asks where a knob has any other value."""
    return lambda found: bool(found != value)


def one_of(*values: Any) -> Asks:
    """Asks where a knob has one of these values."""
    return lambda found: found in values


def exceeds(value: float) -> Asks:
    """Asks where a knob is a larger number."""
    return lambda found: bool(found > value)


def names(*choices: str) -> Asks:
    """Asks where a knob with a choice for each block has any of these for some block."""
    wanted = frozenset(choices)
    return lambda found: not wanted.isdisjoint(found)
