"""The only writer of projects, memberships and accounts."""

import secrets

from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q

from optimizer.base.errors import InvalidInput
from webapp.accounts.models import Membership, Project, Role
from webapp.names import check_name

MAX_NAME_CHARACTERS = 100
ACCOUNT_ROLES = ("admin", "member", "viewer")
"""Roles in the whole service: administrators; people with a project of their own; people who only look where they were
admitted."""


def give_home(user: User) -> Project:
    """A project of the user's own, which they administer."""
    with transaction.atomic():
        project, _ = Project.objects.get_or_create(home_of=user, defaults={"name": user.get_username()[:MAX_NAME_CHARACTERS]})
        Membership.objects.get_or_create(project=project, user=user, defaults={"role": Role.ADMIN})
    return project


def create_project(user: User, *, name: str) -> Project:
    """Its maker administers it."""
    name = check_name(name, max_characters=MAX_NAME_CHARACTERS)
    with transaction.atomic():
        project = Project.objects.create(name=name)
        Membership.objects.create(project=project, user=user, role=Role.ADMIN)
    return project


def set_member(project: Project, *, username: str, role: str) -> Membership:
    """Let somebody in, or give them another role. Raises InvalidInput for an unknown name, and for the last administrator."""
    person = _person(username)
    if role not in Role.values:
        raise InvalidInput(
            f"role is {role[:40]!r}; allowed: {', '.join(Role.values)}", field="role", value=role[:40], allowed=list(Role.values)
        )
    with transaction.atomic():
        if role != Role.ADMIN:
            _keep_one_admin(project, but=person)
        row, _ = Membership.objects.update_or_create(project=project, user=person, defaults={"role": role})
    return row


def remove_member(project: Project, *, username: str) -> bool:
    """False when they did not belong to it. What they made there stays."""
    person = _person(username)
    if project.home_of_id == person.pk:
        raise InvalidInput(
            f"{project.name} is {username}'s own project", field="username", value=username, allowed="anyone else of it"
        )
    with transaction.atomic():
        _keep_one_admin(project, but=person)
        deleted, _ = Membership.objects.filter(project=project, user=person).delete()
    return bool(deleted)


def create_account(*, username: str, role: str) -> tuple[User, str]:
    """The account and its first password, which cannot be had again."""
    username = username.strip()
    try:
        User.username_validator(username)
    except ValidationError as error:
        raise InvalidInput(
            "username may hold letters, digits and @ . + - _ only", field="username", value=username[:80]
        ) from error
    if not 1 <= len(username) <= 60 or User.objects.filter(username__iexact=username).exists():
        raise InvalidInput(
            f"username {username[:80]!r} is taken or too long; allowed: 1 to 60 characters", field="username", value=username[:80]
        )
    password = secrets.token_urlsafe(15)
    with transaction.atomic():
        user = User.objects.create_user(username=username, password=password)
        set_account_role(user, role)
    return user, password


def account_role(user: User) -> str:
    if user.is_superuser:
        return "admin"
    owns = Membership.objects.filter(user=user, project__home_of=user).exclude(role=Role.VIEWER).exists()
    return "member" if owns else "viewer"


def set_account_role(user: User, role: str) -> None:
    """Raises InvalidInput for an unknown role, and when nobody would administer the service any more."""
    if role not in ACCOUNT_ROLES:
        raise InvalidInput(
            f"role is {role[:40]!r}; allowed: {', '.join(ACCOUNT_ROLES)}",
            field="role",
            value=role[:40],
            allowed=list(ACCOUNT_ROLES),
        )
    with transaction.atomic():
        if role != "admin":
            _keep_one_service_admin(but=user)
        user.is_superuser = user.is_staff = role == "admin"
        user.save(update_fields=["is_superuser", "is_staff"])
        home = give_home(user)
        home_role = Role.VIEWER if role == "viewer" else Role.ADMIN
        Membership.objects.filter(project=home, user=user).update(role=home_role)


def set_active(user: User, *, is_active: bool) -> None:
    """An inactive account opens nothing: no log-in, no token, no stream; what it made stays."""
    with transaction.atomic():
        if not is_active:
            _keep_one_service_admin(but=user)
        user.is_active = is_active
        user.save(update_fields=["is_active"])


def _person(username: str) -> User:
    person = User.objects.filter(username=username).first() if username.isprintable() else None
    if person is None:
        raise InvalidInput(
            f"nobody here is called {username[:80]!r}",
            field="username",
            value=username[:80],
            allowed="the name of an account",
            hint="An administrator of the service makes accounts, on the page People.",
        )
    return person


def _keep_one_admin(project: Project, *, but: User) -> None:
    """The rows are locked, so that two administrators cannot take the role from each other at once."""
    admins = list(Membership.objects.select_for_update().filter(project=project, role=Role.ADMIN))
    if admins and all(row.user_id == but.pk for row in admins):
        raise InvalidInput(
            f"{but.get_username()} is the only administrator of {project.name}; give someone else the role first",
            field="username",
            value=but.get_username(),
        )


def _keep_one_service_admin(*, but: User) -> None:
    others = User.objects.select_for_update().filter(Q(is_superuser=True, is_active=True) & ~Q(pk=but.pk))
    if but.is_superuser and not list(others.values_list("pk", flat=True)):
        raise InvalidInput(
            f"{but.get_username()} is the only administrator of the service; give someone else the role first",
            field="username",
            value=but.get_username(),
        )
