"""The page that explains the words of the pages."""

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from webapp.pages.words.glossary import GLOSSARY


@require_GET
@login_required
def words_page(request: HttpRequest) -> HttpResponse:
    return render(request, "words.html", {"glossary": GLOSSARY})
