"""Decisions of a plan that a person holds or edits: a field for each, and how they become ``goal.pins``, a change, and text."""

import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from django import forms

from optimizer.base.categories import CATEGORY_LABELS
from optimizer.base.errors import InvalidInput
from optimizer.base.limits import MAX_DEVICES
from optimizer.plan.knob import Work
from optimizer.plan.pins.generation_knobs import (
    change_generation,
    generation_knobs,
    read_generation_change,
    read_generation_pins,
    written_knobs,
)
from optimizer.plan.pins.table import PinTable
from optimizer.plan.pins.training import knob_kinds, read_pins
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import KNOBS, knobs_of
from webapp.pages.forms.sentences import beside_field, pin_field
from webapp.pages.forms.work import WorkForm, all_labels, label_of

FREE: Final = "free"
_HEADINGS: Final[dict[str, str]] = {
    **dict(CATEGORY_LABELS.items()),
    "batch": "batch",
    "allocator": "allocator",
    "layout": "devices",
}


def _field(knob: str, kind: Any, *, may_be_free: bool, work: Work) -> forms.Field:
    face = getattr(KNOBS[knob], work)
    values = (True, False) if kind is bool else typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if not values:
        return forms.CharField(label=face.label, help_text=face.help, max_length=4000, required=False)
    words = KNOBS[knob].words
    free = [("", FREE)] if may_be_free else []
    choices = [*free, *((_text(value), words.get(value, _text(value))) for value in values)]
    return forms.ChoiceField(label=face.label, help_text=face.help, choices=choices, required=False)


def _refuse(form: forms.Form, knob: str, error: InvalidInput) -> None:
    """Put what is wrong with one decision beside its field."""
    name = pin_field(knob)
    form.add_error(name, beside_field(error.message, label=label_of(form, name), labels=all_labels(form)))


def _grouped(form: forms.Form, knobs: Iterable[str]) -> list[tuple[str, list[Any]]]:
    groups: dict[str, list[Any]] = {}
    for knob in knobs:
        heading = _HEADINGS.get(knob.partition(".")[0], "passes")
        groups.setdefault(heading[:1].upper() + heading[1:], []).append(form[pin_field(knob)])
    return list(groups.items())


def written_pins(pins: Mapping[str, Any]) -> dict[str, str]:
    """The fields' text for ``goal.pins``, of either kind of work."""
    return {pin_field(knob): _text(value) for knob, value in flat_pins(pins) if value is not None}


def flat_pins(part: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``goal.pins`` by path, what is free as None."""
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from flat_pins(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(_runs([str(each) for each in value]))
    return str(value)


def _runs(choices: list[str]) -> list[str]:
    """``["keep", "keep", "recompute"]`` as ``["keep*2", "recompute"]``, as ``read_pins`` reads it; one alone as itself."""
    runs: list[tuple[str, int]] = []
    for choice in choices:
        if runs and runs[-1][0] == choice:
            runs[-1] = (choice, runs[-1][1] + 1)
        else:
            runs.append((choice, 1))
    return [choice if length == 1 else f"{choice}*{length}" for choice, length in runs]


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """The knobs of one kind of plan, and how they are written."""

    kinds: Mapping[str, Any]
    """By path the type of its value."""
    write: Callable[[Any], dict[str, str]]
    """A plan's knobs as text, by path."""
    read: Callable[[list[str]], Any]
    """The change that texts such as ``weights.dtype=bf16`` ask for. Raises InvalidInput."""
    check: Callable[[Any, str], Any]
    """Raises InvalidInput where this one text alone is wrong for the plan."""
    read_pins: Callable[[list[str]], PinTable]
    """Makes of such texts the pins that a goal holds. Raises InvalidInput."""
    work: Work


_ON_ONE_DEVICE: Final = {knob.path: knob_kinds()[knob.path] for knob in knobs_of("training")}
_ON_SEVERAL: Final = {knob.path: knob_kinds()[knob.path] for knob in knobs_of("training", num_devices=MAX_DEVICES)}


def _write_training(plan: Plan) -> dict[str, str]:
    document = plan.to_json()
    return {knob: _text(document[knob.partition(".")[0]][knob.partition(".")[2]]) for knob in _ON_ONE_DEVICE}


TRAINING: Final = Decisions(
    kinds=_ON_ONE_DEVICE,
    write=_write_training,
    read=read_pins,
    check=lambda _, text: read_pins([text]),
    read_pins=read_pins,
    work="training",
)
TRAINING_ON_SEVERAL: Final = replace(TRAINING, kinds=_ON_SEVERAL)
"""For forms where a machine has several devices."""
GENERATION: Final = Decisions(
    kinds=generation_knobs(),
    write=written_knobs,
    read=read_generation_change,
    check=lambda plan, text: change_generation(plan, read_generation_change([text])),
    read_pins=read_generation_pins,
    work="generation",
)


class PinnedForm(WorkForm):
    """A form of work with a field for each decision of its plan; what is free is left to the search."""

    decisions: Decisions

    def __init__(self, *args: Any, decisions: Decisions | None = None, **kwargs: Any) -> None:
        """decisions: the class's unless given."""
        self.decisions = decisions or self.decisions
        fields = {
            pin_field(knob): _field(knob, kind, may_be_free=True, work=self.decisions.work)
            for knob, kind in self.decisions.kinds.items()
        }
        super().__init__(*args, more=fields, **kwargs)

    def clean(self) -> None:
        """Put beside each field what is wrong with it alone."""
        for knob, text in self._held():
            try:
                self.decisions.read_pins([f"{knob}={text}"])
            except InvalidInput as error:
                _refuse(self, knob, error)

    def pin_groups(self) -> list[tuple[str, list[Any]]]:
        """The fields of the plan's decisions under its categories."""
        return _grouped(self, self.decisions.kinds)

    @property
    def holds_any(self) -> bool:
        """Report whether any decision is held, valid or not."""
        return any(self[pin_field(knob)].value() for knob in self.decisions.kinds)

    def goal(self) -> dict[str, Any]:
        pins = self.decisions.read_pins([f"{knob}={text}" for knob, text in self._held()]).to_json()
        return {**super().goal(), "pins": pins} if pins else super().goal()

    def _held(self) -> list[tuple[str, str]]:
        written = {knob: str(self.cleaned_data.get(pin_field(knob)) or "").strip() for knob in self.decisions.kinds}
        return [(knob, text) for knob, text in written.items() if text]


class EditForm(forms.Form):
    """One plan, decision by decision; what differs from it afterwards is the edit."""

    def __init__(self, data: Mapping[str, Any] | None, *, plan: Any, decisions: Decisions, prefix: str) -> None:
        self._plan, self._decisions = plan, decisions
        self._before = decisions.write(plan)
        shown = {f"{prefix}-{pin_field(knob)}": text for knob, text in self._before.items()}
        super().__init__(shown | dict(data or {}), prefix=prefix)
        self.fields.update(
            {
                pin_field(knob): _field(knob, kind, may_be_free=False, work=decisions.work)
                for knob, kind in decisions.kinds.items()
            }
        )

    def clean(self) -> None:
        for knob, text in self._edited():
            try:
                self._decisions.check(self._plan, f"{knob}={text}")
            except InvalidInput as error:
                _refuse(self, knob, error)

    def groups(self) -> list[tuple[str, list[Any]]]:
        return _grouped(self, self._decisions.kinds)

    def change(self) -> Any:
        """The change as the library takes it; None where nothing was changed. Only after ``is_valid()``."""
        edited = [f"{knob}={text}" for knob, text in self._edited()]
        return self._decisions.read(edited) if edited else None

    def _edited(self) -> list[tuple[str, str]]:
        written = {knob: str(self.cleaned_data.get(pin_field(knob)) or "").strip() for knob in self._decisions.kinds}
        return [(knob, text) for knob, text in written.items() if text and text != self._before[knob]]


def typed_knobs(data: Mapping[str, Any], *, decisions: Decisions, prefix: str) -> list[str]:
    """The texts of an edit that names every knob, which needs no other plan to be read; empty where it leaves one out."""
    typed = {knob: str(data.get(f"{prefix}-{pin_field(knob)}") or "").strip() for knob in decisions.kinds}
    return [f"{knob}={text}" for knob, text in typed.items()] if all(typed.values()) else []
