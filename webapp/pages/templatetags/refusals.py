"""Why somebody may not do what a page could offer, in the words of the refusal that would follow; empty where they may.

A page then says so in the button's place: what is pressed and refused has cost a person their time. What is asked is the one
table of ``webapp/accounts/permissions.py``, by the address that the form or link leads to.
"""

from django import template
from django.template import Context
from django.urls import reverse

from webapp.accounts.permissions import refusal_of

register = template.Library()


@register.simple_tag(takes_context=True)
def refused(context: Context, name: str, *args: object, method: str = "POST") -> str:
    """The refusal of a request to the address of this name."""
    error = refusal_of(context["request"].user, method, reverse(name, args=args))
    return "" if error is None else f"{error.message[:1].upper()}{error.message[1:]}. {error.hint}".strip()
