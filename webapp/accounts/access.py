"""Finds the projects that somebody reaches, their role in each, and the rows that this shows them.

How a request came in (a token's scope and project, the project chosen in the header of a page) is kept on the user it came with,
so that every ``*_visible_to(user)`` narrows by it. A user that came with no request reaches all that is theirs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from django.contrib.auth.models import User
from django.db.models import Model as DjangoModel
from django.db.models import Q, QuerySet

from optimizer.base.errors import InvalidInput
from webapp.accounts.errors import Forbidden
from webapp.accounts.models import Membership, Project, Role, Scope
from webapp.prepared import Prepared, number_mark, text_mark

_ROLES = tuple(Role)
_SCOPES = tuple(Scope)
_ROLES_OF: "Prepared[Membership]" = Prepared(
    lambda: Membership.objects.filter(user=number_mark("user_id")).order_by().values_list("project_id", "role"), "user_id"
)
_PROJECT: "Prepared[Project]" = Prepared(lambda: Project.objects.filter(pk=text_mark("project_id")).order_by(), "project_id")
_HOME: "Prepared[Project]" = Prepared(lambda: Project.objects.filter(home_of=number_mark("user_id")).order_by(), "user_id")


@dataclass(frozen=True, kw_only=True)
class Acting:
    """Limits on somebody's rights for one request."""

    scope: Scope = Scope.ADMIN
    token_id: str = ""
    """Empty for a session."""
    project_id: str = ""
    """The project worked in: only its rows are seen, and what is made goes there. Empty for all of them."""
    is_bound: bool = False
    """True where the project is the token's, so that nothing else exists for it."""
    roles: dict[str, Role | None] = field(default_factory=dict, compare=False)
    """By project, those that were looked up already: a request sees them as they were when it came."""


def acting_of(user: Any) -> Acting:
    found: Acting = getattr(user, "acting", None) or Acting()
    return found


def act_as(user: Any, acting: Acting) -> None:
    """For as long as this object of the user lives."""
    user.acting = acting


def act_in(user: User, project: Project | None) -> User:
    """The same user object, at work in one project."""
    act_as(user, replace(acting_of(user), project_id=project.pk if project else ""))
    return user


def is_service_admin(user: Any) -> bool:
    """Administers the service, and came in a way that allows to."""
    acting = acting_of(user)
    return bool(user.is_superuser) and acting.scope == Scope.ADMIN and not acting.is_bound


def has_role(role: Role | None, needed: Role) -> bool:
    return role is not None and _ROLES.index(role) >= _ROLES.index(needed)


def has_scope(scope: Scope, needed: Scope) -> bool:
    return _SCOPES.index(scope) >= _SCOPES.index(needed)


def reachable_projects(user: Any) -> QuerySet[Project]:
    """All projects that somebody may look into, whichever they work in; of a bound token the one."""
    if not user.is_authenticated:
        return Project.objects.none()
    acting = acting_of(user)
    rows = Project.objects.filter(pk=acting.project_id) if acting.is_bound else Project.objects.all()
    return rows if user.is_superuser else rows.filter(memberships__user=user)


def role_in(user: Any, project_id: str) -> Role | None:
    """None for who may not even look, and for a token of another project."""
    acting = acting_of(user)
    if acting.is_bound and acting.project_id != project_id:
        return None
    if user.is_superuser:
        return Role.ADMIN
    if project_id not in acting.roles:
        found = Membership.objects.filter(user=user, project_id=project_id).values_list("role", flat=True).first()
        acting.roles[project_id] = Role(found) if found else None
    return acting.roles[project_id]


def best_role(user: Any) -> Role | None:
    """The highest they have anywhere that they may work now."""
    acting = acting_of(user)
    if acting.project_id:
        return role_in(user, acting.project_id)
    if user.is_superuser:
        return Role.ADMIN
    found = {project_id: Role(role) for project_id, role in _ROLES_OF.values(user_id=user.pk)}
    acting.roles.update(found)
    return max(found.values(), key=_ROLES.index, default=None)


def visible_rows(user: Any) -> Q:
    """The condition on rows with a ``project``."""
    if not user.is_authenticated:
        return Q(pk__isnull=True)
    acting = acting_of(user)
    # never an empty Q: joined by "or" to another condition it would vanish
    narrowed = Q(project=acting.project_id) if acting.project_id else Q(pk__isnull=False)
    if user.is_superuser:
        return narrowed
    return narrowed & Q(project__in=Membership.objects.filter(user=user).values("project"))


@dataclass(frozen=True, kw_only=True)
class Sight:
    """The form of the condition ``visible_rows``, which is the same for all who see all, or work in one project."""

    sees_all: bool
    is_in_project: bool

    @classmethod
    def of(cls, user: Any) -> "Sight":
        return cls(sees_all=bool(user.is_superuser), is_in_project=bool(acting_of(user).project_id))

    def marked_user(self) -> User:
        """Somebody with this sight for a prepared query, whose values are ``values_of`` who asks."""
        user = User(pk=number_mark("user_id"), is_superuser=self.sees_all)
        act_as(user, Acting(project_id=text_mark("project_id") if self.is_in_project else ""))
        return user

    def values_of(self, user: Any) -> dict[str, Any]:
        """The values by which users with this sight differ."""
        values = {} if self.sees_all else {"user_id": user.pk}
        return {**values, "project_id": acting_of(user).project_id} if self.is_in_project else values


def project_for_new(user: Any) -> Project | None:
    """The project of a row that somebody makes without naming one: where they work, else their own. None for nobody's."""
    acting = acting_of(user)
    if acting.project_id:
        return Project.objects.filter(pk=acting.project_id).first()
    return _HOME.first(user_id=user.pk)


def project_of_job(user: Any, parts: "Iterable[DjangoModel | None]") -> Project | None:
    """The project of a job of these rows: a job belongs to the project of what it is made of.

    Raises InvalidInput for rows of several projects, Forbidden for who may only look there.
    """
    owned = {part.project_id: part for part in parts if part is not None and part.project_id}  # type: ignore[attr-defined]
    if len(owned) > 1:
        one, other = list(owned.values())[:2]
        raise InvalidInput(
            f"{one} belongs to project {one.project}, {other} to project {other.project}; a job's parts belong to one",  # type: ignore[attr-defined]
            field="dataset",
            value=other.pk,
            allowed="rows of one project, or what ships with the program",
            hint="Upload it to the other project too.",
        )
    project = _PROJECT.first(project_id=next(iter(owned))) if owned else project_for_new(user)
    if project is not None:
        require_role(user, project.pk, Role.MEMBER)
    return project


def require_place_for_new(user: Any, needed: Role) -> Project:
    """The project of a row that names none. Raises Forbidden for people without one, or with too small a role there."""
    project = project_for_new(user)
    if project is None:
        raise Forbidden("you have no project of your own", hint="Choose a project to work in.")
    require_role(user, project.pk, needed)
    return project


def require_role_somewhere(user: Any, needed: Role) -> None:
    """In any project that they may work in now. Raises Forbidden."""
    if not has_role(best_role(user), needed):
        raise Forbidden(f"this needs the role {needed} in a project", hint="Ask an administrator of one to give it to you.")


def require_role(user: Any, project_id: str, needed: Role) -> None:
    """Raises Forbidden that names the role somebody has, the one that is needed and who can give it."""
    role = role_in(user, project_id)
    if has_role(role, needed):
        return
    project = Project.objects.filter(pk=project_id).first()
    name = project.name if project else project_id
    has = f"you are a {role}" if role else "you do not belong to it"
    raise Forbidden(
        f"this needs the role {needed} in project {name}; {has}",
        hint=f"Ask {' or '.join(_admins_of(project_id))}.",
        needed=str(needed),
        role=str(role or ""),
        project=project_id,
    )


def _admins_of(project_id: str) -> list[str]:
    """A few names; the service's administrators where the project has none."""
    rows = Membership.objects.filter(project_id=project_id, role=Role.ADMIN, user__is_active=True)
    names = list(rows.order_by("user__username").values_list("user__username", flat=True)[:3])
    return names or ["an administrator of the service"]
