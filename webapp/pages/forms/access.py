"""Forms of the pages on access: tokens, projects and their members, accounts."""

from typing import Any

from django import forms

from webapp.accounts.access import reachable_projects
from webapp.accounts.models import Role, Scope
from webapp.accounts.projects import ACCOUNT_ROLES
from webapp.webhooks.models import EVENTS, Kind

SCOPE_WORDS = {
    Scope.READ: "read: look at everything",
    Scope.WRITE: "write: also upload and run jobs",
    Scope.ADMIN: "admin: also manage members, webhooks and tokens",
}


class TokenForm(forms.Form):
    name = forms.CharField(max_length=100, help_text="what will use it, such as: my laptop")
    scope = forms.ChoiceField(
        label="Scope",
        choices=[(scope.value, SCOPE_WORDS[scope]) for scope in Scope],
        initial=Scope.WRITE.value,
        required=False,
    )
    project = forms.ChoiceField(required=False, help_text="a token of one project sees nothing else")
    days = forms.IntegerField(label="Valid for", help_text="days, at most 365", initial=90)

    def __init__(self, *args: Any, user: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rows = [(project.pk, project.name) for project in reachable_projects(user)]
        self.fields["project"].choices = [("", "all my projects"), *rows]  # type: ignore[attr-defined]

    def clean_scope(self) -> str:
        return self.cleaned_data["scope"] or Scope.WRITE.value


class ProjectForm(forms.Form):
    name = forms.CharField(max_length=100, help_text="what you work on together, such as: summaries")


class MemberForm(forms.Form):
    username = forms.CharField(max_length=150, label="Name", help_text="of an account here")
    role = forms.ChoiceField(choices=[(role.value, role.value) for role in Role], initial=Role.MEMBER.value)


class AccountForm(forms.Form):
    username = forms.CharField(max_length=60, label="Name", help_text="letters, digits and @ . + - _")
    role = forms.ChoiceField(choices=[(role, role) for role in ACCOUNT_ROLES], initial="member")


class WebhookForm(forms.Form):
    url = forms.CharField(
        max_length=500, label="Address", help_text="https://example.org/headroom, a channel's https address, or name@example.org"
    )
    kind = forms.ChoiceField(
        required=False,
        choices=[("", "as the address says"), *Kind.choices],
        help_text="choose Slack for another service that understands its messages",
    )
    events = forms.MultipleChoiceField(
        required=False,
        choices=[(event, event) for event in EVENTS],
        widget=forms.CheckboxSelectMultiple,
        help_text="none chosen: all of them for a webhook, the endings for people",
    )
