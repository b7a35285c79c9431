"""API tokens: shown once when made, revoked at any time."""

from typing import cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST

from optimizer.base.errors import InvalidInput
from webapp.accounts.access import reachable_projects
from webapp.accounts.audit import note_target
from webapp.accounts.models import Scope
from webapp.accounts.queries import tokens_visible_to
from webapp.accounts.tokens import create_token, revoke_token
from webapp.pages.forms.access import TokenForm


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def token_list(request: HttpRequest) -> HttpResponse:
    """A new token is in this one answer and nowhere else: no redirect, no message store, no cache."""
    form = TokenForm(request.POST if request.method == "POST" else None, user=request.user)
    new_token = ""
    if form.is_bound and form.is_valid():
        try:
            user = cast(User, request.user)  # login_required has seen to it
            chosen = reachable_projects(user).filter(pk=form.cleaned_data["project"]).first()
            row, new_token = create_token(
                user=user,
                name=form.cleaned_data["name"],
                days=form.cleaned_data["days"],
                scope=Scope(form.cleaned_data["scope"]),
                project=chosen,
            )
            note_target(request, row.pk, detail=f"{row.name}, {row.scope}, {chosen.name if chosen else 'all projects'}")
            form = TokenForm(user=user)
        except InvalidInput as error:
            form.add_error(error.fields["field"], error.message)
    now = timezone.now()
    rows = [
        {"token": token, "state": "revoked" if token.revoked_at else "expired" if token.expires_at <= now else "valid"}
        for token in tokens_visible_to(request.user).select_related("project")
    ]
    answer = render(request, "accounts/tokens.html", {"form": form, "rows": rows, "new_token": new_token})
    answer["Cache-Control"] = "no-store"
    return answer


@require_POST
@login_required
def token_revoke(request: HttpRequest, token_id: str) -> HttpResponse:
    token = get_object_or_404(tokens_visible_to(request.user), pk=token_id)
    if revoke_token(token):
        messages.success(request, f"Token {token.name} is revoked; it opens nothing from now on.")
    return redirect("tokens")
