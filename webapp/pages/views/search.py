"""Search over jobs, models, datasets, machines and pages by name: the palette's list, or a page of links without a script."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from django.contrib.auth.decorators import login_required
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET

from webapp.catalog.distinct_names import distinct_names
from webapp.catalog.queries import datasets_visible_to, machines_visible_to, models_visible_to
from webapp.jobs.queries import jobs_visible_to

MAX_EACH = 6
PAGES: Final = (
    ("New job", "job_new", "train fine-tune lora qlora start"),
    ("Generate text", "generate_new", "inference prompts batch"),
    ("Jobs", "jobs", "runs list queue waiting"),
    ("Compare runs", "job_compare", ""),
    ("Models", "models", "upload weights"),
    ("Datasets", "datasets", "upload text chats"),
    ("Machines", "machines", "gpu card worker"),
    ("Plan", "plans", "memory fits cards budget"),
    ("Chat", "chat", "ask talk"),
    ("Settings", "settings", "account theme dark light password"),
    ("API tokens", "tokens", "key"),
    ("Projects", "projects", "members notices webhooks slack mail"),
    ("API documentation", "api_docs", "rest openapi"),
    ("Glossary", "words", "help meaning"),
    ("Welcome", "welcome", "demo first start tour"),
)
"""Title, name of the address, and further words that find it."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One place to go to."""

    label: str
    url: str
    what: str
    """Kind of thing, in a word or two."""


@require_GET
@login_required
def search_page(request: HttpRequest) -> HttpResponse:
    query = request.GET.get("q", "").replace("\0", "").strip()[:100]
    is_part = bool(request.htmx)  # type: ignore[attr-defined]
    context = {"hits": list(_hits(request.user, query)), "query": query}
    return render(request, "search_options.html" if is_part else "search.html", context)


def _hits(user: Any, query: str) -> Iterator[Hit]:
    for title, name, words in PAGES:
        if not query or query.lower() in f"{title} {words}".lower():
            yield Hit(label=title, url=reverse(name), what="page")
    # ids sort by creation time: newest first
    jobs = jobs_visible_to(user).filter(_named(query)).order_by("-pk").values_list("pk", "name", "state")
    for pk, name, state in jobs[:MAX_EACH]:
        yield Hit(label=name, url=reverse("job", args=[pk]), what=f"job, {state}")
    most = MAX_EACH if query else 0
    for what, rows in (("model", models_visible_to(user)), ("dataset", datasets_visible_to(user))):
        found = rows.filter(_named(query)).select_related("project").order_by("-pk")[:most]
        for pk, name in distinct_names(found).items():
            yield Hit(label=name, url=reverse(what, args=[pk]), what=what)
    for pk, name in machines_visible_to(user).filter(_named(query)).order_by("-pk").values_list("pk", "name")[:most]:
        yield Hit(label=name, url=reverse("machine", args=[pk]), what="machine")


def _named(query: str) -> Q:
    return Q(name__icontains=query) | Q(pk__iendswith=query)
