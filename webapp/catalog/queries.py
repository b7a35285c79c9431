"""The only way to read this app's rows: what ships with the program is everyone's, the rest its project's people's."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from django.db.models import Q, QuerySet

from webapp.accounts.access import Sight, visible_rows
from webapp.catalog.models import Dataset, Machine, Model, Profile, Upload
from webapp.prepared import Prepared, text_mark

R = TypeVar("R", Model, Dataset)


def models_visible_to(user: Any) -> QuerySet[Model]:
    return Model.objects.filter(_visible(user), deleted_at__isnull=True)


def datasets_visible_to(user: Any) -> QuerySet[Dataset]:
    return Dataset.objects.filter(_visible(user), deleted_at__isnull=True)


def find_model(user: Any, pk: str) -> Model | None:
    """The row of ``models_visible_to`` with this id."""
    return _first(_model_by_id, user, pk)


def find_dataset(user: Any, pk: str) -> Dataset | None:
    """The row of ``datasets_visible_to`` with this id."""
    return _first(_dataset_by_id, user, pk)


def deleted_models_visible_to(user: Any) -> QuerySet[Model]:
    """Deleted rows that can still be restored."""
    return Model.objects.filter(_visible(user), deleted_at__isnull=False)


def deleted_datasets_visible_to(user: Any) -> QuerySet[Dataset]:
    return Dataset.objects.filter(_visible(user), deleted_at__isnull=False)


def uploads_visible_to(user: Any) -> QuerySet[Upload]:
    """A person's own alone: whoever began one goes on with it."""
    return Upload.objects.filter(visible_rows(user), owner=user) if user.is_authenticated else Upload.objects.none()


def machines_visible_to(user: Any) -> QuerySet[Machine]:
    """Every signed-in person may use every machine."""
    return Machine.objects.all() if user.is_authenticated else Machine.objects.none()


def most_devices(user: Any) -> int:
    """Devices of the machine that has most; 0 while none is known."""
    rows = machines_visible_to(user).order_by().values_list("document__num_devices", "document__others")
    counted = ((number or 1) + sum(kind.get("num_devices", 1) for kind in others or ()) for number, others in rows)
    return int(max(counted, default=0))


def profile_state(model: Model) -> str:
    """``ready`` (for some kind of training, or to generate), ``pending`` (being made, or not asked for yet) or ``failed``."""
    return profile_states([model])[model.fingerprint]


def profile_states(rows: list[Model]) -> dict[str, str]:
    """By fingerprint, in three queries; the documents themselves stay in the database."""
    fingerprints = {row.fingerprint for row in rows}
    found = Profile.objects.filter(fingerprint__in=fingerprints)
    states = dict.fromkeys(fingerprints, "pending")
    states |= dict.fromkeys(found.filter(error__isnull=False).values_list("fingerprint", flat=True), "failed")
    states |= dict.fromkeys(found.filter(document__isnull=False).values_list("fingerprint", flat=True), "ready")
    variants = Profile.objects.filter(model_fingerprint__in=fingerprints, document__isnull=False)
    states |= dict.fromkeys(variants.values_list("model_fingerprint", flat=True), "ready")
    return states


def _visible(user: Any) -> Q:
    return visible_rows(user) | Q(project__isnull=True, owner__isnull=True) if user.is_authenticated else Q(pk__isnull=True)


def _first(prepared: "Callable[[Sight], Prepared[R]]", user: Any, pk: str) -> R | None:
    if not user.is_authenticated:
        return None
    sight = Sight.of(user)
    return prepared(sight).first(pk=pk, **sight.values_of(user))


@cache
def _model_by_id(sight: Sight) -> "Prepared[Model]":
    names = sight.values_of(sight.marked_user())
    return Prepared(lambda: models_visible_to(sight.marked_user()).filter(pk=text_mark("pk")).order_by(), "pk", *names)


@cache
def _dataset_by_id(sight: Sight) -> "Prepared[Dataset]":
    names = sight.values_of(sight.marked_user())
    return Prepared(lambda: datasets_visible_to(sight.marked_user()).filter(pk=text_mark("pk")).order_by(), "pk", *names)
