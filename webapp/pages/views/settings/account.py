"""The first page under Settings: who is logged in, and how pages look."""

from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_GET, require_POST

from webapp.accounts.projects import account_role
from webapp.pages.context import THEME_COOKIE, THEMES

YEAR_S = 365 * 24 * 3600


@require_GET
def account_page(request: HttpRequest) -> HttpResponse:
    role = account_role(request.user) if isinstance(request.user, User) else ""
    return render(request, "accounts/account.html", {"role": role, "themes": THEMES})


@require_POST
def theme_set(request: HttpRequest) -> HttpResponse:
    """Keeps the choice in a cookie for a year; ``system`` forgets it. The page that asked is shown again, unless a script did."""
    chosen = request.POST.get("theme", "")
    address = request.headers.get("Referer", "")
    is_ours = url_has_allowed_host_and_scheme(address, allowed_hosts={request.get_host()})
    answer = HttpResponse(status=204) if request.htmx else redirect(address if is_ours else "home")  # type: ignore[attr-defined]
    if chosen in THEMES and chosen != "system":
        answer.set_cookie(THEME_COOKIE, chosen, max_age=YEAR_S, samesite="Lax", secure=request.is_secure())
    else:
        answer.delete_cookie(THEME_COOKIE, samesite="Lax")
    return answer
