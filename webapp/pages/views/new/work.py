"""Serves the new-job pages of all workloads: shows a form, prices it after each edit, takes uploads, starts its job."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse

from optimizer.base.errors import HeadroomError
from webapp.catalog.models import Model
from webapp.jobs.errors import PlanDoesNotFit
from webapp.jobs.models import PlanOffer
from webapp.jobs.queries import jobs_visible_to, offers_visible_to
from webapp.pages.forms.kinds import FormKind, first_model
from webapp.pages.forms.work import WorkForm, initial_from_query, list_problems
from webapp.pages.shown.price_view import Pricing, glance_for_page, price_for_page
from webapp.planning.submitting import submit_job

_INSIST = "Take a plan that fits, raise the budget, or tick “Start it even if it does not fit” below the plans."


@dataclass(frozen=True, kw_only=True)
class FormPage:
    """One workload's page."""

    form: FormKind
    template: str
    price_address: str
    describe: Callable[[WorkForm], dict[str, Any]]
    """Further values for the template."""
    example: Callable[[], dict[str, Any] | None] = lambda: None
    """The spec that ``?example=yes`` fills the form from."""

    def empty_form(self, request: HttpRequest) -> WorkForm:
        return self.form.make_form(request, None, self._initial(request))

    def _initial(self, request: HttpRequest) -> dict[str, Any]:
        """From the job that is cloned, and over it from the address."""
        initial: dict[str, Any] = {"model": first_model(self.form.models(request), request.user)}
        if source_id := request.GET.get("from", ""):
            source = jobs_visible_to(request.user).filter(pk=source_id, kind=self.form.kind).first()
            if source is None:
                messages.error(request, "The job to clone is not there; the form starts empty.")
            else:
                initial |= self.form.initial_from_spec(source.spec)
        elif request.GET.get("example") and (example := self.example()) is not None:
            initial |= self.form.initial_from_spec(example)
        return initial | initial_from_query(request.GET)


def answer_form(request: HttpRequest, page: FormPage) -> HttpResponse:
    """The form, prefilled from ``?from=<job>`` or ``?example=yes`` and from any field that the address names.

    A POST starts the job; with ``look`` it only prices it, for browsers without JavaScript.
    """
    if request.method != "POST":
        return _shown(request, page, page.empty_form(request), Pricing(kind="refused", message="Not priced yet."))
    form = page.form.make_form(request, request.POST, {})
    if not form.is_valid():
        return _shown(request, page, form, Pricing(kind="incomplete", problems=list_problems(form)))
    if request.POST.get("look"):
        return _shown(request, page, form, priced(request, form))
    spec = form.spec()
    try:
        job = submit_job(
            request.user,
            spec=spec,
            plan_id=request.POST.get("plan_id") or None,
            override=bool(request.POST.get("override")),
            actor=f"user:{request.user.get_username()}",
        )
    except HeadroomError as error:
        if form.put_error(error):
            return _shown(request, page, form, Pricing(kind="incomplete", problems=list_problems(form)))
        hint = _INSIST if isinstance(error, PlanDoesNotFit) else error.hint
        form.add_error(None, f"{error.message[:1].upper()}{error.message[1:]}. {hint}".strip())
        return _shown(request, page, form, priced(request, form))
    return redirect("job", job.pk)


def answer_price(request: HttpRequest, page: FormPage) -> HttpResponse:
    """The verdict, the plans and the errors for what stands in the form now; its fields are not sent back.

    With ``glance`` a first answer may come, which asks for the search's by itself.
    """
    form = page.form.make_form(request, request.POST, {})
    pricing = _looked_at(request, form) if form.is_valid() else Pricing(kind="incomplete", problems=list_problems(form))
    return render(request, "jobs/price.html", {"form": form, "pricing": pricing, **_unread(form), **_addresses(page)})


def _looked_at(request: HttpRequest, form: WorkForm) -> Pricing:
    if request.POST.get("glance") == "yes":
        offer = _taken(request)
        first = glance_for_page(request.user, form.spec(), taken=offer.plan if offer else None)
        if first is not None:
            return first
    return priced(request, form)


def priced(request: HttpRequest, form: WorkForm) -> Pricing:
    """Price a valid form; an error that names a field is put beside it."""
    pricing, problem = price_for_page(request.user, form.spec(), selected=selected_offer(request))
    if problem is not None and form.put_error(problem.error):
        return Pricing(kind="incomplete", problems=list_problems(form))
    return pricing


def answer_upload(
    request: HttpRequest,
    page: FormPage,
    *,
    field: str,
    make_upload: Callable[..., forms.Form],
    upload: Callable[..., str],
    template: str,
) -> HttpResponse:
    """Upload beside the form: the answer is that step of it again, what was uploaded selected.

    field: which it is for; also what ids and names begin with. upload: makes the row and says its id, or puts the reason on the
    upload's form and says nothing.
    """
    ids = f"{field}_upload_%s"
    given = make_upload(request.POST, request.FILES, auto_id=ids)
    made = upload(request, given) if given.is_valid() else ""
    form = page.form.make_form(request, None, {field: made or request.POST.get(field)})
    shown = make_upload(auto_id=ids) if made else given
    answer = render(request, template, {"form": form, f"{field}_upload": shown})
    if made:
        answer["HX-Trigger-After-Settle"] = "uploaded"
    return answer


def _shown(request: HttpRequest, page: FormPage, form: WorkForm, pricing: Pricing) -> HttpResponse:
    context = {
        "form": form,
        "pricing": pricing,
        "kind": page.form.kind,
        **_unread(form),
        **_addresses(page),
        **page.describe(form),
    }
    return render(request, page.template, context)


def _unread(form: WorkForm) -> dict[str, Any]:
    """Settings of the chosen model's config.json that no price covers; models that nobody may see are in no choice."""
    chosen = form["model"].value()
    is_offered = chosen in dict(cast(Any, form.fields["model"]).choices)
    return {"unread": Model.objects.filter(pk=chosen).values_list("unread", flat=True).first() if is_offered else ()}


def _addresses(page: FormPage) -> dict[str, str]:
    return {"form_url": reverse(page.form.address), "price_url": reverse(page.price_address)}


def has_errors(form: forms.Form, names: tuple[str, ...]) -> bool:
    """Report whether a section that is closed at first must be open."""
    return form.is_bound and any(name in form.errors for name in names)


def selected_offer(request: HttpRequest) -> str:
    """``label@machine`` of the offer that was taken, so that it stays taken when prices are made anew."""
    offer = _taken(request)
    return f"{offer.label}@{offer.machine_id}" if offer else ""


def _taken(request: HttpRequest) -> PlanOffer | None:
    plan_id = request.POST.get("plan_id", "")
    return offers_visible_to(request.user).filter(pk=plan_id).first() if plan_id.isprintable() else None
