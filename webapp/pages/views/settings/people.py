"""Accounts of the service, for its administrators: who there is, what they may do, a first password shown once."""

from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from optimizer.base.errors import InvalidInput
from webapp.accounts.audit import note_target
from webapp.accounts.projects import ACCOUNT_ROLES, account_role, create_account, set_account_role, set_active
from webapp.pages.forms.access import AccountForm

CHANGES = ("deactivate", "activate", *ACCOUNT_ROLES)


@require_http_methods(["GET", "HEAD", "POST"])
def people_list(request: HttpRequest) -> HttpResponse:
    """A first password is in this one answer and nowhere else."""
    form = AccountForm(request.POST if request.method == "POST" else None)
    made: dict[str, str] = {}
    if form.is_bound and form.is_valid():
        try:
            user, password = create_account(username=form.cleaned_data["username"], role=form.cleaned_data["role"])
            note_target(request, user.get_username(), detail=form.cleaned_data["role"])
            made = {"username": user.get_username(), "password": password}
            form = AccountForm()
        except InvalidInput as error:
            form.add_error(error.fields["field"], error.message)
    rows = [{"person": person, "role": account_role(person)} for person in User.objects.order_by("username")]
    answer = render(request, "accounts/people.html", {"form": form, "rows": rows, "made": made, "roles": ACCOUNT_ROLES})
    answer["Cache-Control"] = "no-store"
    return answer


@require_POST
def people_change(request: HttpRequest) -> HttpResponse:
    person = get_object_or_404(User, username=request.POST.get("username", "").replace("\0", ""))
    change = request.POST.get("change", "")
    try:
        if change in ACCOUNT_ROLES:
            set_account_role(person, change)
        elif change in CHANGES:
            set_active(person, is_active=change == "activate")
        note_target(request, person.get_username(), detail=change if change in CHANGES else "")
        messages.success(request, f"{person.get_username()} is changed.")
    except InvalidInput as error:
        messages.error(request, f"{error.message}.")
    return redirect("people")
