"""Serves the new-job pages of all workloads: shows a form, prices it after each edit, takes uploads, starts its job."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.text import capfirst

from optimizer.base.errors import HeadroomError
from webapp.catalog.models import Dataset, Model
from webapp.jobs.errors import PlanDoesNotFit
from webapp.jobs.models import PlanOffer
from webapp.jobs.queries import jobs_visible_to, offers_visible_to
from webapp.jobs.specs.recipes import RECIPES
from webapp.pages.forms.intents import fields_of
from webapp.pages.forms.kinds import FormKind, first_model, usable_budget
from webapp.pages.forms.work import WorkForm, initial_from_query, list_problems
from webapp.pages.shown.price_view import Pricing, glance_for_page, price_for_page
from webapp.pages.words.catalog import unusable_lines
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
        model = first_model(self.form.models(request), request.user)
        initial: dict[str, Any] = {"model": model, "device_budget": usable_budget(request.user)}
        if source_id := request.GET.get("from", ""):
            source = jobs_visible_to(request.user).filter(pk=source_id, kind=self.form.kind).first()
            if source is None:
                messages.error(request, "The job to clone is not there; the form starts empty.")
            else:
                initial |= self.form.initial_from_spec(source.spec)
                follows = "finetune" if source.model is not None and source.model.has_weights else "pretrain"
                if initial.get("mode") == follows:  # written out in every spec; another model may have weights
                    initial["mode"] = ""
        elif request.GET.get("example") and (example := self.example()) is not None:
            initial |= self.form.initial_from_spec(example)
        if (recipe := RECIPES.get(request.GET.get("recipe", ""))) is not None:
            initial |= fields_of({"workload": recipe.workload, "goal": recipe.goal})
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
            when_ready=True,
            actor=f"user:{request.user.get_username()}",
        )
    except HeadroomError as error:
        if form.put_error(error):
            return _shown(request, page, form, Pricing(kind="incomplete", problems=list_problems(form)))
        hint = _INSIST if isinstance(error, PlanDoesNotFit) else error.hint
        form.add_error(None, f"{capfirst(form.in_words(error.message))}. {form.in_words(hint)}".strip())
        return _shown(request, page, form, priced(request, form))
    return redirect("job", job.pk)


def answer_price(request: HttpRequest, page: FormPage) -> HttpResponse:
    """The verdict, the plans and the errors for what stands in the form now; its fields are not sent back.

    With ``glance`` a first answer may come, which asks for the search's by itself.
    """
    form = page.form.make_form(request, request.POST, {})
    if form.is_valid():
        pricing = _looked_at(request, form)
    else:
        awaits_machine, missing = form.awaits_machine, form.take_missing()
        pricing = Pricing(kind="incomplete", message=missing, problems=list_problems(form), awaits_machine=awaits_machine)
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
    if pricing.kind != "refused":
        return pricing
    return replace(pricing, message=capfirst(form.in_words(pricing.message)), hint=form.in_words(pricing.hint))


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
    """Settings of the chosen model's config.json that no price covers, whether its weights would not be used, and the prompts
    that get no answer."""
    model = Model.objects.only("unread", "has_weights").filter(pk=_chosen(form, "model")).first()
    prompts = Dataset.objects.filter(pk=_chosen(form, "prompts")).first() if "prompts" in form.fields else None
    is_from_scratch = "mode" in form.fields and form["mode"].value() == "pretrain"
    return {
        "unread": model.unread if model else (),
        "leaves_weights": model is not None and model.has_weights and is_from_scratch,
        "unusable": unusable_lines(prompts) if prompts else (),
    }


def _chosen(form: WorkForm, name: str) -> str:
    """The id of the chosen row; empty for one that is not offered, since nobody may see others."""
    chosen = str(form[name].value())
    return chosen if chosen in dict(cast(Any, form.fields[name]).choices) else ""


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
