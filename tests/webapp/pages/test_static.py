"""Files served beside the pages: the vendored bundle is the one that was named, and nothing reaches for another host."""

import hashlib
import re
from pathlib import Path

import pytest

STATIC = Path(__file__).resolve().parents[3] / "static"
OWN = sorted([*STATIC.glob("js/*.js"), *STATIC.glob("css/*.css")])


def test_the_vendored_bundle_is_the_one_that_source_md_names() -> None:
    folder = STATIC / "vendor" / "plotly"
    named = re.search(r"[0-9a-f]{64}", (folder / "SOURCE.md").read_text())
    assert named is not None
    assert hashlib.sha256((folder / "plotly-lines-bars.min.js").read_bytes()).hexdigest() == named[0]


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_own_scripts_and_styles_name_no_host(path: Path) -> None:
    assert not re.search(r"https?://|//[a-z]+\.[a-z]", path.read_text())


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_own_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_the_charts_offer_no_cloud() -> None:
    text = (STATIC / "js" / "charts.js").read_text()
    for setting in ("showSendToCloud: false", 'plotlyServerURL: ""', "displaylogo: false", "responsive: true"):
        assert setting in text
