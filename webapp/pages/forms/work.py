"""The base of all job forms: a name, a model, an objective, budgets, and what a plan may and may not do.

A value that does not parse is kept as typed, with the reason beside its field. ``form_query`` writes a form as an address, which
fills the same form again.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, cast
from urllib.parse import urlencode

from django import forms
from django.db.models import Model as Row
from django.http import QueryDict

from optimizer.base.errors import HeadroomError
from optimizer.base.units import format_bytes, parse_bytes
from optimizer.plan.techniques import TECHNIQUE_GROUPS, TECHNIQUE_LABELS, Technique
from webapp.jobs.specs.mirrors import TITLES as MIRROR_TITLES
from webapp.jobs.specs.mirrors import open_mirrors
from webapp.pages.forms.options import option_labels
from webapp.pages.forms.sentences import beside_field, field_of, in_words

FORM_ID = "job-form"
"""Fields stand outside the form element, because upload forms stand between them and forms cannot nest."""
NO_MACHINE = "no_machine"
"""Code of the error that goes away by itself once a machine has registered."""
TIERS = ("device", "host", "disk")


class BytesField(forms.CharField):
    """A size as people write it: ``480 MiB``."""

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value)
        if not text:
            return None
        if re.fullmatch(r"[0-9]+([.,][0-9]+)?", text.strip()):
            raise forms.ValidationError(f"{text.strip()} what? Write {text.strip()} GiB or {text.strip()} MiB.")
        try:
            return parse_bytes(text)
        except ValueError as error:
            raise forms.ValidationError(str(error)) from error


class WorkForm(forms.Form):
    """One job spec. Whoever inherits adds the fields of its workload and writes ``spec``."""

    techniques: ClassVar[tuple[Technique, ...]] = tuple(TECHNIQUE_LABELS)
    """Those that may be forbidden here."""
    use_required_attribute = False
    """The server says what is missing. An upload beside the form sends its field along, and htmx sends nothing of a form with a
    required field that is empty: who had no model or prompts yet could upload none.
    """
    usable_budget: Callable[[], str] = staticmethod(lambda: "")
    """Memory that one job can have on the machine at hand, as text; empty while none is known."""
    decimals: ClassVar[tuple[str, ...]] = ()
    """Text fields for numbers: the browser's number field drops what it cannot parse, and people write 1e-3."""

    name = forms.CharField(max_length=200, required=False, help_text="empty: after the model and its data")
    model = forms.ChoiceField()
    objective = forms.ChoiceField(label="Optimise for", required=False)
    device_budget = BytesField(
        label="Device memory budget", help_text="such as 12 GiB; empty: all that the device can give", required=False
    )
    host_budget = BytesField(label="Host memory budget", help_text="empty: what the machine has free", required=False)
    disk_budget = BytesField(label="Disk budget", help_text="empty: what the machine has free", required=False)
    forbid = forms.MultipleChoiceField(label="Never use", required=False, widget=forms.CheckboxSelectMultiple)
    mirrors = forms.MultipleChoiceField(
        label="Copy the measurements to", required=False, widget=forms.CheckboxSelectMultiple
    )

    def __init__(self, *args: Any, more: Mapping[str, forms.Field] | None = None, **kwargs: Any) -> None:
        """more: fields that no class names."""
        super().__init__(*args, **kwargs)
        self.names: dict[str, str] = {}
        """Names of the rows that are offered, by id."""
        self.fields.update(more or {})
        cast(forms.ChoiceField, self.fields["forbid"]).choices = [(name, TECHNIQUE_LABELS[name]) for name in self.techniques]
        if mirrors := open_mirrors():
            cast(forms.ChoiceField, self.fields["mirrors"]).choices = [(name, MIRROR_TITLES[name]) for name in mirrors]
        else:
            del self.fields["mirrors"]
        for name in self.decimals:
            self.fields[name].widget = forms.TextInput(attrs={"inputmode": "decimal"})
        for field in self.fields.values():
            field.widget.attrs["form"] = FORM_ID
            field.error_messages["required"] = "Choose one." if isinstance(field, forms.ChoiceField) else "Fill this in."

    def take_missing(self) -> str:
        """The fields still to be filled in, as ``choose prompts and fill in steps``; empty where none is missing. A field that
        nobody has reached, or that a machine will fill, is not wrong yet, so its error leaves the form."""
        missing = []
        for name, errors in list(self.errors.as_data().items()):
            codes = {error.code for error in errors}
            field = self.fields[name]
            label = str(field.label or name.replace("_", " ")).lower()
            if codes == {NO_MACHINE}:
                missing.append(f"wait until a worker has measured the first machine or fill in {label}")
            elif codes == {"required"}:
                missing.append(f"{'choose' if isinstance(field, forms.ChoiceField) else 'fill in'} {label}")
            else:
                continue
            del self.errors[name]
        return " and ".join(missing)

    @property
    def awaits_machine(self) -> bool:
        """True where a field can be filled once a machine has registered. Asked before ``take_missing``."""
        return any(error.code == NO_MACHINE for errors in self.errors.as_data().values() for error in errors)

    def clean_device_budget(self) -> int:
        """All that the newest machine's device can give, where nothing was typed."""
        typed: int | None = self.cleaned_data["device_budget"]
        if typed is not None:
            return typed
        usable = self.usable_budget()
        if not usable:
            message = "Wait for the first machine, whose memory will be taken, or type a size: no machine has registered yet."
            raise forms.ValidationError(message, code=NO_MACHINE)
        return parse_bytes(usable)

    def offer_rows(self, name: str, rows: Iterable[Row], *, nothing: str) -> None:
        """The options of a choice; ``nothing`` says what to do where there is none."""
        found = list(cast(Iterable[Any], rows))
        labels = option_labels(found)
        self.names |= {row.pk: str(row.name) for row in found}
        cast(forms.ChoiceField, self.fields[name]).choices = [(row.pk, labels[row.pk]) for row in found] or [("", nothing)]

    def job_name(self, *fields: str) -> str:
        """The name as typed, else the names of the rows that these fields chose: ``llama on verses``."""
        chosen = [self.names[self.cleaned_data[field]] for field in fields if self.cleaned_data[field]]
        return self.cleaned_data["name"] or " on ".join(chosen)[:200]

    def technique_groups(self) -> list[tuple[str, list[Any]]]:
        """The boxes of ``forbid`` under their headings; headings without a box are left out."""
        boxes = {box.data["value"]: box for box in self["forbid"]}
        groups = [(heading, [boxes[name] for name in names if name in boxes]) for heading, names in TECHNIQUE_GROUPS]
        return [(heading, found) for heading, found in groups if found]

    def spec(self) -> dict[str, Any]:
        """The job spec as the API takes it. Only after ``is_valid()``."""
        raise NotImplementedError

    def goal(self) -> dict[str, Any]:
        data = self.cleaned_data
        budgets = {f"{tier}_budget_bytes": data[f"{tier}_budget"] for tier in TIERS if data[f"{tier}_budget"] is not None}
        objective = data["objective"] or self.fields["objective"].initial
        goal = {**budgets, "allow_lossy": data.get("allow_lossy", False), "objective": objective}
        if data.get("most_loss"):
            goal |= {"allow_lossy": True, "most_loss": data["most_loss"]}
        if data.get("on_out_of_memory"):
            goal["on_out_of_memory"] = data["on_out_of_memory"]
        if data.get("num_devices") is not None and data["num_devices"] != 1:
            goal["num_devices"] = data["num_devices"]
        return {**goal, "forbid": data["forbid"]} if data["forbid"] else goal

    def mirrors_part(self) -> dict[str, Any]:
        """The spec's word on services that the measurements are copied to."""
        chosen = self.cleaned_data.get("mirrors")
        return {"mirrors": chosen} if chosen else {}

    def put_error(self, error: HeadroomError) -> bool:
        """Put an error of the library beside the field it names. False when it names none of this form's."""
        name = field_of(str(error.fields.get("field", "")))
        if name not in self.fields:
            return False
        self.add_error(name, beside_field(error.message, label=label_of(self, name), labels=all_labels(self)))
        return True

    def in_words(self, message: str) -> str:
        """A library's message with this form's labels in the place of the API's fields."""
        return in_words(message, labels=all_labels(self))


def label_of(form: forms.BaseForm, name: str) -> str:
    return str(form.fields[name].label or name.replace("_", " ").capitalize())


def all_labels(form: forms.BaseForm) -> dict[str, str]:
    """By the fields' names."""
    return {name: label_of(form, name) for name in form.fields}


def initial_goal(goal: Mapping[str, Any]) -> dict[str, Any]:
    """Values of every form's fields for a spec's goal."""
    budgets = {
        f"{tier}_budget": exact_bytes(goal[f"{tier}_budget_bytes"])
        for tier in TIERS
        if goal.get(f"{tier}_budget_bytes") is not None
    }
    most_loss = goal.get("most_loss", "any") if goal.get("allow_lossy") else ""
    initial = {**budgets, "allow_lossy": bool(most_loss), "most_loss": most_loss, "forbid": list(goal.get("forbid", ()))}
    chosen = {name: goal[name] for name in ("objective", "on_out_of_memory", "num_devices") if goal.get(name)}
    return {**initial, **chosen}


def initial_from_query(query: QueryDict) -> dict[str, Any]:
    """Values from an address that ``form_query`` wrote."""
    return {name: query.getlist(name) if name in ("forbid", "mirrors") else query[name] for name in query}


def form_query(form: forms.BaseForm, changes: Mapping[str, Any] | None = None) -> str:
    """The form as a query string: what differs from an empty one, with some fields changed."""
    values = {name: form[name].value() for name in form.fields} | dict(changes or {})
    pairs = [
        (name, typed)
        for name, value in values.items()
        if (typed := _typed(value)) != (_typed(form.fields[name].initial) if name in form.fields else [])
    ]
    return urlencode([(name, text) for name, typed in pairs for text in typed or [""]])


def _typed(value: Any) -> list[str]:
    """The value as a browser would send it."""
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    if value is None or value is False or value == "":
        return []
    return ["on"] if value is True else [str(value)]


def exact_bytes(num_bytes: int) -> str:
    """The rounded form where it reads back to the same number, else plain bytes."""
    rounded = format_bytes(num_bytes)
    return rounded if parse_bytes(rounded) == num_bytes else f"{num_bytes} B"


def typed_of(form: forms.BaseForm) -> QueryDict:
    """The form as a browser would send it, so that an address can be read as if it had been typed."""
    data = QueryDict(mutable=True)
    for name, field in form.fields.items():
        if texts := _typed(form[name].value()) or _first_option(field):
            data.setlist(name, texts)
    return data


def _first_option(field: forms.Field) -> list[str]:
    """A list from which nothing was chosen stands on its first line."""
    if not isinstance(field, forms.ChoiceField) or isinstance(field, forms.MultipleChoiceField):
        return []
    return _typed(next((value for value, _ in cast(Any, field.choices)), None))


def list_problems(form: forms.Form) -> tuple[str, ...]:
    """The form's problems in sentences; each stands beside its field as well."""
    return tuple(_problem(form, name, str(error)) for name, errors in form.errors.items() for error in errors)


def _problem(form: forms.Form, name: str, error: str) -> str:
    """The error with its field's label, which it may begin with already."""
    label = label_of(form, name) if name in form.fields else ""
    return error if not label or error.startswith((label, f"“{label}”")) else f"{label}: {error}"
