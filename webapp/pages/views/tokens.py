"""API tokens: shown once when made, revoked at any time."""

from typing import cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST

from optimizer.errors import InvalidInput
from webapp.accounts.queries import tokens_visible_to
from webapp.accounts.tokens import create_token, revoke_token
from webapp.pages.forms import TokenForm


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def token_list(request: HttpRequest) -> HttpResponse:
    """A new token is in this one answer and nowhere else: no redirect, no message store, no cache."""
    form = TokenForm(request.POST if request.method == "POST" else None)
    new_token = ""
    if form.is_bound and form.is_valid():
        try:
            user = cast(User, request.user)  # login_required has seen to it
            _, new_token = create_token(user=user, name=form.cleaned_data["name"], days=form.cleaned_data["days"])
            form = TokenForm()
        except InvalidInput as error:
            form.add_error(error.fields["field"], error.message)
    now = timezone.now()
    rows = [
        {"token": token, "state": "revoked" if token.revoked_at else "expired" if token.expires_at <= now else "valid"}
        for token in tokens_visible_to(request.user)
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
