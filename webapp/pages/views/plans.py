"""The page Plans: every plan that a search found, some side by side, any of them edited, and the same work on other cards.

All of the question is in the address, in the words of the new-job form, so that it can be sent to somebody else:
``on`` is a machine's id or a card (``gpu:T4``), ``with`` names plans to show beside the chosen one, ``try-...`` edits that one;
``from`` a job leads to the address of what it asked for.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET

from optimizer.errors import HeadroomError, NoFeasiblePlan
from optimizer.hardware.devices import known_devices
from optimizer.plan.pins import pins_of_change
from optimizer.plan.plan import Plan
from webapp.catalog.models import Profile
from webapp.catalog.queries import machines_visible_to, models_visible_to
from webapp.jobs.cards import rank_some_cards
from webapp.jobs.models import Kind
from webapp.jobs.plan_questions import Asked, Question, read_question
from webapp.jobs.queries import jobs_visible_to
from webapp.jobs.searches import problem_of
from webapp.pages import plans
from webapp.pages.forms import JobForm, initial_from_spec
from webapp.pages.pin_fields import EditForm, written_pins
from webapp.pages.presentation import largest_part
from webapp.pages.pricing import ways_out
from webapp.pages.views.new_job import make_job_form
from webapp.pages.views.work import first_model, incomplete
from webapp.pages.work_form import form_query, initial_from_query, typed_of

CARD = "gpu:"
EDIT = "try"
DEFAULT_CARD = "RTX 4090"
"""Where no machine has registered."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A machine or a card that the work may be put on."""

    key: str
    name: str


@require_GET
@login_required
def plans_page(request: HttpRequest) -> HttpResponse:
    if job_id := request.GET.get("from"):
        return redirect(f"{reverse('plans')}?{_address_of_job(request, job_id)}")
    form, places, on = _read(request)
    context: dict[str, Any] = {
        "form": form,
        "places": places,
        "on": on,
        "form_url": reverse("job_new"),
        "query": form_query(form),
        "kept": [pair for pair in _pairs(request, without=()) if pair[0] != "on"],
        "page_base": "base.html",
    }
    if not form.is_valid():
        return render(request, "plans/page.html", {**context, "problems": incomplete(form).problems}, status=422)
    try:
        asked = read_question(request.user, _question(form, on))
        if asked is None:
            return render(request, "plans/page.html", {**context, "waiting_since": _asked_at(request, form)})
        return render(request, "plans/page.html", context | _described(request, form, asked))
    except NoFeasiblePlan as error:
        return render(request, "plans/page.html", context | _nothing_fits(error))
    except HeadroomError as error:
        problems = [f"{error.message}. {error.hint}".strip()]
        return render(request, "plans/page.html", {**context, "problems": problems}, status=422)


@require_GET
@login_required
def plans_cards(request: HttpRequest) -> HttpResponse:
    """A part of the page: cards ranked, as many as are known so far; it asks for the rest by itself."""
    asked = _asked(request)
    order: Literal["speed", "money"] = "money" if request.GET.get("order") == "money" else "speed"
    found = rank_some_cards(asked.question, order=order)
    since = request.GET.get("since") or timezone.localtime().strftime("%H:%M:%S")
    context = {
        "found": found,
        "order": order,
        "addresses": {name: f"?{_with(request, order=name)}" for name in ("speed", "money")},
        "since": since,
        "again": f"{reverse('plans_cards')}?{_with(request, since=since)}",
        "page_base": "fragment.html" if request.headers.get("HX-Request") else "base.html",
    }
    return render(request, "plans/cards.html", context)


@require_GET
@login_required
def plans_step(request: HttpRequest) -> HttpResponse:
    """The table behind a plan's chart of its step: ``plan`` is its key."""
    asked = _asked(request)
    points, _, _ = _points(request, asked)
    point = plans.find_point(points, request.GET.get("plan", ""))
    if point is None:
        raise Http404("no such plan")
    context = {
        "point": point,
        "table": plans.timeline_table(point.priced),
        "page_base": "fragment.html" if request.headers.get("HX-Request") else "base.html",
    }
    return render(request, "plans/step.html", context)


def _address_of_job(request: HttpRequest, job_id: str) -> str:
    """All that a training job asked for, and the machine that it was priced on."""
    job = get_object_or_404(jobs_visible_to(request.user), pk=job_id, kind=Kind.TRAIN)
    query = form_query(make_job_form(request, None, initial_from_spec(job.spec)))
    return f"{query}&{urlencode({'on': job.machine_id})}" if job.machine_id else query


def _read(request: HttpRequest) -> tuple[JobForm, list[_Place], str]:
    """The form that the address fills, where the work may go, and where it goes."""
    user = request.user
    initial = {"model": first_model(models_visible_to(user), user)} | initial_from_query(request.GET)
    form = make_job_form(request, typed_of(make_job_form(request, None, initial)), {})
    form.fields["dataset"].required = False  # no plan depends on it
    places = [_Place(key=machine.pk, name=machine.name) for machine in machines_visible_to(user).order_by("name")]
    default = places[0].key if places else f"{CARD}{DEFAULT_CARD}"
    places += [_Place(key=f"{CARD}{name}", name=name) for name in known_devices()]
    return form, places, request.GET.get("on") or default


def _question(form: JobForm, on: str) -> Question:
    spec = form.spec()
    return Question(
        model=spec["model"],
        workload=spec["workload"],
        goal=spec["goal"],
        machine=None if on.startswith(CARD) else on,
        gpu=on.removeprefix(CARD) if on.startswith(CARD) else None,
    )


def _asked(request: HttpRequest) -> Asked:
    """For the parts of the page, which are only asked for once the page itself has answered."""
    form, _, on = _read(request)
    if not form.is_valid():
        raise Http404("the address is not that of a form")
    try:
        asked = read_question(request.user, _question(form, on))
    except HeadroomError as error:
        raise Http404(error.message) from error
    if asked is None:
        raise Http404("the model is still being profiled")
    return asked


def _asked_at(request: HttpRequest, form: JobForm) -> datetime | None:
    """Since when the profile that the question needs has been waited for."""
    from optimizer.profile.profile import profile_fingerprint
    from webapp.jobs.spec import read_workload

    spec = form.spec()
    fingerprint = models_visible_to(request.user).get(pk=spec["model"]).fingerprint
    wanted = profile_fingerprint(fingerprint, read_workload(spec["workload"]).adapter)
    return Profile.objects.filter(fingerprint=wanted).values_list("created_at", flat=True).first()


def _points(request: HttpRequest, asked: Asked) -> tuple[tuple[plans.Point, ...], EditForm, list[str]]:
    """Every plan; the form that edits the chosen one, and in words what was edited."""
    from optimizer.search.compare import reprice

    answer = asked.answer()
    chosen = answer.result.chosen
    typed = {name: request.GET[name] for name in request.GET if name.startswith(f"{EDIT}-")}
    edit = EditForm(typed, plan=chosen.plan.to_json(), prefix=EDIT)
    yours, words = None, []
    if edit.is_valid() and (change := edit.change()) is not None:
        try:
            edited = reprice(problem_of(asked.question), chosen.plan, change=change)
        except HeadroomError as error:
            edit.add_error(None, f"{error.message}. {error.hint}".strip())
        else:
            yours, words = edited.priced, plans.edited_words(edited.differences)
    points = plans.list_points(answer, yours=yours)
    wanted = request.GET.getlist("with") or ["keep_all"]
    return plans.choose_points(points, wanted), edit, words


def _described(request: HttpRequest, form: JobForm, asked: Asked) -> dict[str, Any]:
    answer = asked.answer()
    points, edit, edited = _points(request, asked)
    compared = plans.compared_points(points)
    chosen, budget_bytes = answer.result.chosen, asked.question.goal.device_budget_bytes
    return {
        "asked": asked,
        "answer": answer,
        "chosen": chosen,
        "largest": largest_part(chosen.prediction.device_bytes_by_category),
        "budget_bytes": budget_bytes,
        "points": points,
        "compared": compared,
        "groups": plans.side_by_side(compared, num_steps=answer.workload.num_steps),
        "edit": edit,
        "edited": edited,
        "knobs": _knobs(request, asked, chosen.plan),
        "facts": plans.chart_facts(points, budget_bytes=budget_bytes),
        "steps": [(point, f"{reverse('plans_step')}?{_with(request, plan=point.key)}") for point in compared],
        "cards_url": f"{reverse('plans_cards')}?{request.GET.urlencode()}",
        "kept_beside": {
            "with": _pairs(request, without=("with",)),
            "try": _pairs(request, without=(f"{EDIT}-",)),
        },
    }


def _knobs(request: HttpRequest, asked: Asked, plan: Plan) -> list[dict[str, Any]]:
    """What each single change of the chosen plan would come to, the largest saving first."""
    from optimizer.search.knobs import list_knobs

    rows = []
    for knob in list_knobs(problem_of(asked.question), plan):
        fields = written_pins(pins_of_change(plan, knob.plan))
        allowed = {} if knob.is_lossless else {"allow_lossy": "on"}
        rows.append(
            {
                "knob": knob,
                "try": _with(request, drop=(f"{EDIT}-",), **{f"{EDIT}-{name}": text for name, text in fields.items()}),
                "hold": _with(request, drop=(f"{EDIT}-",), **fields, **allowed),
            }
        )
    return rows


def _nothing_fits(error: NoFeasiblePlan) -> dict[str, Any]:
    return {
        "nothing_fits": error.message,
        "pricing": {"suggestions": ways_out(error)},
        "largest": largest_part(error.fields["bytes_by_category"]),
    }


def _pairs(request: HttpRequest, *, without: tuple[str, ...]) -> list[tuple[str, str]]:
    """The address's parameters but those that begin with any of these."""
    return [(name, text) for name in request.GET if not name.startswith(without) for text in request.GET.getlist(name)]


def _with(request: HttpRequest, *, drop: tuple[str, ...] = (), **changes: str) -> str:
    """This address with some parameters set anew."""
    kept = [(name, text) for name, text in _pairs(request, without=drop) if name not in changes]
    return urlencode([*kept, *changes.items()])
