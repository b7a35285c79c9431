"""Chat with a model, base and tuned side by side; the answers stream from ``POST /api/v1/chat/completions``."""

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from webapp.serving.choices import choose_pair, list_choices


@require_GET
@login_required
def chat_page(request: HttpRequest) -> HttpResponse:
    choices = list_choices(request.user)
    left, right = choose_pair(choices, wanted=request.GET.getlist("model"))
    return render(request, "chat.html", {"choices": choices, "left": left, "right": right})
