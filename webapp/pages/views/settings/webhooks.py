"""Webhooks of a project: addresses that hear of its jobs, their secrets shown once, and the log of what was sent."""

from typing import cast

from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from optimizer.base.errors import InvalidInput
from webapp.accounts.access import reachable_projects
from webapp.accounts.audit import note_target
from webapp.pages.forms.access import WebhookForm
from webapp.webhooks import actions
from webapp.webhooks.models import Webhook
from webapp.webhooks.queries import deliveries_visible_to, webhooks_visible_to

PAGE_SIZE = 50


@require_http_methods(["GET", "HEAD", "POST"])
def webhook_list(request: HttpRequest, project_id: str) -> HttpResponse:
    """A new secret is in this one answer and nowhere else."""
    project = get_object_or_404(reachable_projects(request.user), pk=project_id)
    form = WebhookForm(request.POST if request.method == "POST" else None)
    secret = ""
    if form.is_bound and form.is_valid():
        try:
            row, secret = actions.create_webhook(
                cast(User, request.user),
                project,
                url=form.cleaned_data["url"],
                events=form.cleaned_data["events"],
                kind=form.cleaned_data["kind"],
            )
            note_target(request, row.pk, detail=row.shown_url)
            form = WebhookForm()
        except InvalidInput as error:
            form.add_error(error.fields["field"], f"{error.message}. {error.hint}".strip())
    context = {
        "project": project,
        "form": form,
        "secret": secret,
        "webhooks": webhooks_visible_to(request.user).filter(project=project),
    }
    return _unstored(render(request, "accounts/webhooks.html", context))


@require_GET
def webhook_page(request: HttpRequest, webhook_id: str) -> HttpResponse:
    return _page(request, _webhook(request, webhook_id))


@require_POST
def webhook_secret(request: HttpRequest, webhook_id: str) -> HttpResponse:
    webhook = _webhook(request, webhook_id)
    note_target(request, webhook.pk)
    return _page(request, webhook, secret=actions.renew_secret(webhook))


@require_POST
def webhook_test(request: HttpRequest, webhook_id: str) -> HttpResponse:
    actions.send_test(_webhook(request, webhook_id))
    messages.success(request, "A test is on its way; how it went is in the log within seconds.")
    return redirect("webhook", webhook_id)


@require_POST
def webhook_switch(request: HttpRequest, webhook_id: str) -> HttpResponse:
    """On when it is off, off when it is on."""
    webhook = _webhook(request, webhook_id)
    actions.set_active(webhook, is_active=not webhook.is_active)
    return redirect("webhook", webhook_id)


@require_POST
def webhook_delete(request: HttpRequest, webhook_id: str) -> HttpResponse:
    webhook = _webhook(request, webhook_id)
    project_id = webhook.project_id
    actions.delete_webhook(webhook)
    messages.success(request, f"Nothing is sent to {webhook.shown_url} any more.")
    return redirect("webhooks", project_id)


@require_POST
def delivery_replay(request: HttpRequest, delivery_id: str) -> HttpResponse:
    delivery = get_object_or_404(deliveries_visible_to(request.user), pk=delivery_id)
    actions.replay(delivery)
    messages.success(request, "It is sent once more within seconds.")
    return redirect("webhook", delivery.webhook_id)


def _webhook(request: HttpRequest, webhook_id: str) -> Webhook:
    return get_object_or_404(webhooks_visible_to(request.user), pk=webhook_id)


def _page(request: HttpRequest, webhook: Webhook, *, secret: str = "") -> HttpResponse:
    before = request.GET.get("before", "")
    found = deliveries_visible_to(request.user).filter(webhook=webhook)
    rows = list((found.filter(pk__lt=before) if before else found).order_by("-pk")[: PAGE_SIZE + 1])
    context = {
        "webhook": webhook,
        "secret": secret,
        "deliveries": rows[:PAGE_SIZE],
        "older": rows[PAGE_SIZE - 1].pk if len(rows) > PAGE_SIZE else "",
    }
    return _unstored(render(request, "accounts/webhook.html", context))


def _unstored(answer: HttpResponse) -> HttpResponse:
    answer["Cache-Control"] = "no-store"
    return answer
