from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.report import write
from tests.report.browser import Browser, Page, chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("needs a Chromium on the PATH (Debian: apt-get install chromium)")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


Shown = Callable[..., Page]


@pytest.fixture
def shown(browser: Browser) -> Shown:
    """Write the page of a folder and show it: ``shown(folder, width=390, scripts=False)``."""

    def show(folder: Path, width: int = 1280, scripts: bool = True) -> Page:
        return Page.show(browser, write(folder), width=width, scripts=scripts)

    return show
