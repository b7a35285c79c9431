"""Files of the pages as ``collectstatic`` leaves them: named by their content, compressed, kept by browsers for a year."""

import re
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.test import AsyncClient, override_settings


@pytest.fixture(scope="module")
def collected_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("collected") / "static"
    with override_settings(STATIC_ROOT=root):
        call_command("collectstatic", "--noinput", "--verbosity", "0")
    return root


@pytest.fixture
def collected(collected_once: Path, settings: Any) -> Path:
    settings.STATIC_ROOT = collected_once
    return collected_once


def test_modules_name_one_another_by_their_hashed_names(collected: Path) -> None:
    named = [name for path in collected.glob("js/*.js") for name in re.findall(r'from "\./([^"]+)"', path.read_text())]
    assert len(named) > 10
    assert all((collected / "js" / name).exists() and re.search(r"\.[0-9a-f]{12}\.js$", name) for name in named)


def test_scripts_and_styles_lie_there_compressed_and_under_no_other_name(collected: Path) -> None:
    for path in (*collected.glob("js/*.js"), *collected.glob("css/*.css"), *collected.glob("vendor/*/*.js")):
        assert re.search(r"\.[0-9a-f]{12}\.(min\.)?(js|css)$", path.name), path.name
        assert path.stat().st_size < 400 or path.with_name(f"{path.name}.br").exists(), path.name
    (plotly,) = collected.glob("vendor/plotly/*.js")
    assert plotly.with_name(f"{plotly.name}.br").stat().st_size < 0.32 * plotly.stat().st_size


async def test_browsers_keep_them_for_a_year_and_get_them_compressed(collected: Path) -> None:
    (path,) = collected.glob("js/charts.*.js")
    response = await AsyncClient().get(f"/static/js/{path.name}", headers={"accept-encoding": "gzip, br"})
    assert response.status_code == 200
    assert response["Content-Encoding"] == "br"
    assert "immutable" in response["Cache-Control"]
    assert int(re.search(r"max-age=(\d+)", response["Cache-Control"])[1]) >= 31_536_000
