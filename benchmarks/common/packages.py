"""Packages that plans need and a machine may lack: the machine of a card often has neither bitsandbytes nor greenlet."""

from contextlib import suppress
from importlib.util import find_spec
from operator import attrgetter

from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation import GenerationPins
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import KNOBS, Technique

NEEDS_PACKAGE = "needs a package"
"""``what`` of a row for something that is left out for want of a package. It is not judged, unlike what a run had no time for."""


def missing_package(plan: Plan | GenerationPlan) -> str | None:
    """The name of a package that the plan needs and that is not installed here; None where nothing is missing."""
    for knob in KNOBS.values():
        for package in knob.packages:
            with suppress(AttributeError):  # a decision that plans of this kind do not have
                if package.asks(attrgetter(knob.path)(plan)) and find_spec(package.name) is None:
                    return package.name
    return None


def list_impossible() -> tuple[Technique, ...]:
    """Techniques of training that a search may choose and that cannot be carried out here."""
    return () if find_spec("bitsandbytes") is not None else ("8bit_optimizer",)


def generation_pins() -> GenerationPins:
    """Pins that keep a search for a generation to what can be carried out here."""
    return GenerationPins() if find_spec("greenlet") is not None else GenerationPins(num_micro_batches=1)
