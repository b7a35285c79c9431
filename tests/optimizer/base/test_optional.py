"""Packages that may be missing: what is said then, and what is not said where they are there."""

import logging
import sys
from typing import Never

import pytest

from optimizer.base.errors import MissingExtra
from optimizer.base.optional import load_bitsandbytes, without_advice

ADVISES = "bitsandbytes.backends.cpu.ops"


def test_advice_to_install_more_is_left_out_while_it_is_imported_and_heard_again_after(
    caplog: pytest.LogCaptureFixture
) -> None:
    with without_advice():
        logging.getLogger(ADVISES).warning("install more")
    assert not caplog.records
    logging.getLogger(ADVISES).warning("something is wrong")
    assert [record.message for record in caplog.records] == ["something is wrong"]


def test_the_level_comes_back_where_the_import_fails() -> Never:
    level = logging.getLogger(ADVISES).level
    with pytest.raises(ImportError), without_advice():
        raise ImportError("no such library")
    assert logging.getLogger(ADVISES).level == level


def test_a_package_that_is_missing_is_named_with_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtra, match="this needs the package 'bitsandbytes'"):
        load_bitsandbytes(needed_for="this")
