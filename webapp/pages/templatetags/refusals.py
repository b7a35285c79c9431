"""Why somebody may not do what a page could offer, in the words of the refusal that would follow; empty where they may.

A page then says so in the button's place: what is pressed and refused has cost a person their time.
"""

from collections.abc import Callable
from typing import Any

from django import template
from django.template import Context

from webapp.accounts.access import require_place_for_new, require_role, require_role_somewhere
from webapp.accounts.errors import Forbidden
from webapp.accounts.models import Role

register = template.Library()


@register.simple_tag(takes_context=True)
def refused_here(context: Context) -> str:
    """Making something where they work."""
    return _reason(lambda: require_place_for_new(context["request"].user, Role.MEMBER))


@register.simple_tag(takes_context=True)
def refused_anywhere(context: Context) -> str:
    """Making something whose project follows from what it is made of."""
    return _reason(lambda: require_role_somewhere(context["request"].user, Role.MEMBER))


@register.simple_tag(takes_context=True)
def refused_in(context: Context, project_id: str | None) -> str:
    """Changing a row of this project. Of rows that are everyone's nothing is offered anyway."""
    return _reason(lambda: require_role(context["request"].user, project_id or "", Role.MEMBER))


def _reason(require: Callable[[], Any]) -> str:
    try:
        require()
    except Forbidden as error:
        return f"{error.message[:1].upper()}{error.message[1:]}. {error.hint}"
    return ""
