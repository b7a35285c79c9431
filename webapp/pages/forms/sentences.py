"""Words the library's messages for people: a path of the API or of a plan becomes the label of the form's field.

The API names a field in ``field``; on a page nobody knows what ``workload.sequence_length`` is.
"""

import re
from collections.abc import Mapping
from typing import Final

PIN_PREFIX: Final = "pin_"
_PATH: Final = re.compile(r"\b(?:(workload|goal|plan|spec)\.)?([a-z_0-9]+(?:\.[a-z_0-9]+)*)(?:\[\d+\])?")
_REFUSED: Final = re.compile(r"([a-z_0-9.\[\]]+) is .*?; allowed: (.+)", re.DOTALL)
_NUMBER: Final = re.compile(r"an? (?:integer|number) (from|above) (\S+)(?: to (\S+))?")
_ALIASES: Final = {"allow_lossy": "most_loss"}
"""Fields that a form may have in the place of the API's."""
_WORDS: Final = (
    ("goal.allow_lossy is false", "goal.allow_lossy does not permit that"),
    ("goal.most_loss is rounding", "goal.most_loss permits only rounding"),
    ("no plan keeps every pin", "no plan keeps every locked setting"),
    ("what is pinned", "what is locked"),
    ("leave a pin out", "lock one setting less"),
    ("or leave the pin out", "or lock it no longer"),
)


def field_of(path: str) -> str:
    """The form's field for one of the API: ``workload.adapter.rank``, ``goal.disk_budget_bytes``, ``goal.pins.weights.dtype``."""
    if ".export." in path:
        return f"export_{path.rsplit('.', 1)[-1]}"
    if ".pins." in path:
        return pin_field(path.partition(".pins.")[2].partition("[")[0])
    return path.rsplit(".", 1)[-1].partition("[")[0].removesuffix("_bytes")


def pin_field(knob: str) -> str:
    """The field that holds a knob: ``pin_weights_dtype`` for ``weights.dtype``."""
    return PIN_PREFIX + knob.replace(".", "_")


def beside_field(message: str, *, label: str, labels: Mapping[str, str]) -> str:
    """The message as it stands beside its field: ``Sequence length must be 8 to 131,072``.

    labels: of all fields of the form, by their names.
    """
    found = _REFUSED.fullmatch(message)
    if found is None or _label_of(found[1], labels) not in (label, None):
        return in_words(message, labels=labels)
    return f"{label} must be {_NUMBER.sub(_range, found[2])}"


def in_words(message: str, *, labels: Mapping[str, str]) -> str:
    """The message with each field as its label in quotes, and with paths that the form does not have as words."""
    for library, form in _WORDS:
        message = message.replace(library, form)
    return _PATH.sub(lambda found: _named(found, labels), message)


def _named(found: re.Match[str], labels: Mapping[str, str]) -> str:
    whole, section, rest = found[0], found[1], found[2]
    is_knob = section is None and "." in rest and pin_field(rest) in labels
    if section is None and not is_knob:
        return whole  # a word, or a file's name
    label = _label_of(whole, labels)
    return f"“{label}”" if label else rest.removeprefix("pins.").replace(".", " ").replace("_", " ")


def _label_of(path: str, labels: Mapping[str, str]) -> str | None:
    bare = path.removeprefix("plan.").partition("[")[0]
    name = field_of(path)
    return labels.get(pin_field(bare)) or labels.get(name) or labels.get(_ALIASES.get(name, ""))


def _range(found: re.Match[str]) -> str:
    """``8 to 131,072``, ``above 0, at most 1``, ``at least 1``."""
    kind, low, high = found.groups()
    if kind == "above":
        return f"above {low}" + (f", at most {high}" if high else "")
    return f"{low} to {high}" if high else f"at least {low}"
