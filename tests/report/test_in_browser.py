"""The page in a real browser: by keyboard, by day and night, on a phone."""

import json
import os
import re
import select
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from runner.report import write
from tests.process import wait_for
from tests.report.examples import HOSTILE, LAYERS, config, rows, troubled, write_run

pytestmark = pytest.mark.xdist_group("browser")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
# Puts the pipe's two ends where Chromium looks for them, then becomes Chromium.
START = "import os,sys;a=sys.argv;os.dup2(int(a[1]),3);os.dup2(int(a[2]),4);os.execvp(a[3],a[3:])"


class Browser:
    """One Chromium with a profile of its own."""

    def __init__(self, profile):
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        assert program, "needs a Chromium on the PATH (Debian: apt-get install chromium)"
        read, self._commands = os.pipe()
        self._answers, write = os.pipe()
        # Above 4, so that putting one in its place does not close the other.
        low = [os.dup(0) for _ in range(4)]
        ends = [os.dup(read), os.dup(write)]
        starter = [sys.executable, "-c", START, *map(str, ends)]
        nothing: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        words = [*starter, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(words, pass_fds=ends, **nothing)
        for end in (read, write, *ends, *low):
            os.close(end)
        self._held = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method, session=None, **parameters):
        """Return the answer to one command; events that come before it are kept."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                assert select.select([self._answers], [], [], 120)[0], f"{method}: no answer"
                part = os.read(self._answers, 1 << 20)
                assert part, f"{method}: the browser ended"
                self._held += part
            text, self._held = self._held.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def close(self):
        """End Chromium and all of its processes."""
        try:
            self.send("Browser.close")
        except (OSError, AssertionError):
            self._process.kill()
        self._process.wait(timeout=120)
        os.close(self._commands)
        os.close(self._answers)


class Page:
    """One tab that shows a file, with all that it logged and asked for."""

    def __init__(self, browser, file, width=1280):
        self.browser, self._file, self._width = browser, file, width
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(900)
        self.send("Page.navigate", url=file.as_uri())
        self.until("document.readyState === 'complete' && location.protocol === 'file:'")

    def send(self, method, **parameters):
        """Return the answer to a command to this tab."""
        return self.browser.send(method, self._session, **parameters)

    def _seen(self, method):
        events = [one for one in self.browser.events if one.get("sessionId") == self._session]
        return [event["params"] for event in events if event.get("method") == method]

    @property
    def complaints(self):
        """Exceptions, console output and log entries."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [str(event) for kind in kinds for event in self._seen(kind)]

    @property
    def requests(self):
        """Addresses that were asked for beyond the page itself, and data in addresses."""
        asked = [event["request"]["url"] for event in self._seen("Network.requestWillBeSent")]
        own = self._file.as_uri()
        return [url for url in asked if url != own and not url.startswith(("data:", "blob:"))]

    def ask(self, expression):
        """Return the value of an expression of JavaScript in the page."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression):
        """Wait until an expression is true."""
        wait_for(lambda: self.ask(expression), shown=lambda: expression)

    def press(self, key, code=0):
        """Press a key, as a hand would."""
        for kind in ("keyDown", "keyUp"):
            about = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            about |= {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", **about)

    def resize(self, height):
        """Change the height of the window, in pixels of style sheets."""
        size = {"width": self._width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)


CHARTS = "[...document.querySelectorAll('figure[data-chart]')]"
# The charts in which something is drawn that has an extent on the screen.
DRAWN = f"""{CHARTS}.filter(figure => [...figure.querySelectorAll(
    '.cartesianlayer .trace path, .cartesianlayer .heatmaplayer image')].some(mark => {{
        const box = mark.getBoundingClientRect();
        return box.width + box.height > 0; }})).map(figure => figure.dataset.chart)"""
PLOT = "document.querySelector('#chart-{} .plot')"
READING = "document.querySelector('#chart-{} .reading').textContent"
RUNS = "[...document.querySelectorAll('#runs tbody tr[data-run]')].map(row => row.dataset.run)"
SETTINGS = "[...document.querySelectorAll('#runs tbody')].map(body => body.id.slice(-1))"
LOSSES = np.array([[0.10, 0.21, 0.28], [0.12, 0.20, 0.33], [0.50, 0.62, 0.69]])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The page of a sweep of three thresholds with three seeds, whose best losses are LOSSES."""
    folder = tmp_path_factory.mktemp("s")
    for place, loss in enumerate(LOSSES.ravel()):
        made = rows("norm", 0.5 + place // 3, 100, seed=place, layers=LAYERS)
        for row in made:
            row.pop("eval/loss", None)
        made[49]["eval/loss"], made[-1]["eval/loss"] = loss + 0.1, loss
        of = config(clip__threshold=0.5 + place // 3, seed=place % 3)
        words = (f"clip.threshold={0.5 + place // 3}", f"seed={place % 3}")
        write_run(folder / str(place), made, of, overrides=words)
    return write(folder)


def assert_quiet(page):
    assert page.complaints == []
    assert page.requests == []
    assert page.ask("document.documentElement.dataset.ready") == "true"


def drawn(page):
    """Make the window as high as the page, so that every chart is near, and wait for them."""
    page.resize(page.ask("document.documentElement.scrollHeight") + 100)
    page.until(f"{DRAWN}.length === {CHARTS}.length")
    return set(page.ask(DRAWN))


def press(page, selector):
    """Press a button by a key, where it can be seen."""
    page.ask(f"document.querySelector(`{selector}`).focus()")
    page.press("Enter", 13)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", ["sweep", "run"])
def test_every_chart_is_drawn_and_fits_by_day_and_night_and_on_paper(browser, swept, kind, width):
    file = swept if kind == "sweep" else write(swept.parent / "0")
    page = Page(browser, file, width)
    assert {"loss", "eval-loss", "norm-norm", "clipped-norm", "histogram"} <= drawn(page)
    assert page.ask("document.documentElement.scrollWidth") <= width
    parts = "[...document.querySelectorAll('figure, .main-svg, #runs caption span')]"
    assert page.ask(f"Math.max(...{parts}.map(s => s.getBoundingClientRect().right))") <= width
    names = f"{PLOT.format('heat-0')}.querySelectorAll('.ytick text')"
    assert len(set(page.ask(f"[...{names}].map(t => t.textContent)"))) == len(LAYERS)
    brightness = (
        """(color => color.match(/\\d+/g).slice(0, 3).map(Number).reduce((a, b) => a + b))"""
    )
    back = f"{brightness}(getComputedStyle(document.body).backgroundColor)"
    text = (
        f"{brightness}(getComputedStyle({PLOT.format('loss')}.querySelector('.xtick text')).fill)"
    )
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.send("Emulation.setEmulatedMedia", features=features)
        page.until(f"({back} - {text}) * {1 if scheme == 'light' else -1} > 400")
    paper, closed = f"{PLOT.format('loss')}._fullLayout.paper_bgcolor", "details:not([open])"
    for event in ("beforeprint", "afterprint"):
        page.ask(f"dispatchEvent(new Event('{event}'))")
        assert (page.ask(paper) == "#ffffff") == (event == "beforeprint")
        folds = page.ask(f"document.querySelectorAll('{closed}').length")
        assert (folds == 0) == (event == "beforeprint")
    assert_quiet(page)


def test_the_table_sorts_and_selects(browser, swept):
    page = Page(browser, swept)
    assert page.ask(RUNS) == list("012345678")
    cell = "row.cells[document.querySelector('#runs th[data-key=difference]').cellIndex]"
    column = f"[...document.querySelectorAll('#runs tr')].slice(1).map(row => {cell}.dataset.value)"
    pairs = LOSSES - LOSSES[0]
    expected = np.column_stack([pairs.mean(1), pairs]).ravel()
    expected[:4] = np.nan
    assert [float(one or "nan") for one in page.ask(column)] == pytest.approx(expected, nan_ok=True)
    for order in (["0", "1", "2"], ["2", "1", "0"]):  # the seeds of a setting stay together
        press(page, '#runs th[data-key="best/eval/loss"] button')
        assert page.ask(SETTINGS) == order
    assert [int(run) // 3 for run in page.ask(RUNS)] == [2] * 3 + [1] * 3 + [0] * 3

    drawn(page)
    names = f"[...new Set({PLOT.format('loss')}.data.filter(t => t.visible).map(t => t.name))]"
    every = len(page.ask(names))
    press(page, '#runs a[href="#run-2"]')
    page.until(f"{names}.length === 1")
    assert page.ask(names) == ["norm 0.5 · run 2"]
    assert "seed=2" in page.ask("document.querySelector('#selected').textContent")
    press(page, "#selected button")
    page.until(f"{names}.length === {every}")
    press(page, "#key button[data-group='1']")  # a setting is hidden in all charts
    page.until(f"{names}.length < {every}")
    assert page.ask("document.querySelectorAll('tbody.dim').length") == 1
    assert_quiet(page)


def test_charts_are_read_and_smoothed_by_keys(browser, swept):
    page = Page(browser, swept)
    drawn(page)
    plot, reading = PLOT.format("eval-loss"), READING.format("eval-loss")
    page.ask(f"{plot}.focus()")
    page.press("ArrowRight", 39)
    page.until(f"{reading}.endsWith(' at 50')")
    values = sorted(map(float, re.findall(r": ([\d.]+)", page.ask(reading))))
    assert values == pytest.approx(sorted(LOSSES.ravel() + 0.1), rel=1e-3)
    press(page, "#chart-metric-norm .log")
    page.until(f"{PLOT.format('metric-norm')}._fullLayout.yaxis.type === 'log'")
    # 30 % of 100 rows are 30: the 14 before a row, itself, and the 15 after it.
    press(page, '#runs a[href="#run-2"]')
    mean = f"Array.from({PLOT.format('loss')}.data.filter(t => t.visible && t.customdata)[0].y)"
    page.ask("document.querySelector('#smoothing').focus()")
    page.press("End", 35)
    losses = [row["train/loss"] for row in rows("norm", 0.5, 100, seed=2, layers=LAYERS)]
    near = np.asarray(losses)[50 - 14 : 50 + 16]
    log = page.ask(f"{PLOT.format('loss')}._fullLayout.yaxis.type") == "log"
    smooth = float(np.exp(np.log(near).mean()) if log else near.mean())
    page.until(f"Math.abs({mean}[50] / {smooth} - 1) < 1e-5")
    reached, at = set(), "document.activeElement"
    for _ in range(page.ask("document.querySelectorAll('button, a, summary, [tabindex]').length")):
        page.press("Tab", 9)
        reached.add(page.ask(f"{at}.ariaLabel || {at}.className || {at}.id || {at}.tagName"))
    assert {"BUTTON", "A", "SUMMARY", "log", "Download as PNG", "Zoom"} <= reached
    assert_quiet(page)


def test_text_of_configurations_is_inert_and_lost_runs_sort_last(browser, tmp_path):
    file = write(troubled(tmp_path / HOSTILE.replace("/", "_")))
    page = Page(browser, file)
    assert drawn(page)
    assert_quiet(page)
    assert page.ask("window.broken") is None
    assert page.ask("document.querySelectorAll('img, foreignObject').length") == 0
    assert HOSTILE in page.ask("[...document.querySelectorAll('#runs td')].map(c => c.textContent)")
    for _ in range(2):
        press(page, '#runs th[data-key="final/eval/loss"] button')
        assert page.ask(RUNS)[-2:] in (["6", "9"], ["9", "6"])
    # A foreign script would not run even in the page, and the browser tells of it.
    planted = "<script>window.broken=1</script><img src='https://example.invalid/a.png'></body>"
    tampered = tmp_path / "tampered.html"
    tampered.write_text(file.read_text().replace("</body>", planted))
    page = Page(browser, tampered)
    assert page.ask("[window.broken, document.documentElement.dataset.ready]") == [None, "true"]
    assert len(page.complaints) == 2
    assert all("Content Security Policy" in complaint for complaint in page.complaints)
