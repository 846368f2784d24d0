"""A Chromium of its own for the tests of the page, and pictures of pages.

    python -m tests.report.browser outputs/sweeps/NAME .assets/report.png 1280 1600

draws the part of a page that stands first; without a height, all of it.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runner.report import write
from tests.process import wait_for

CHARTS = "[...document.querySelectorAll('figure[data-chart]')]"
# The charts in which something is drawn that has an extent on the screen.
DRAWN = f"""{CHARTS}.filter(figure => [...figure.querySelectorAll(
    '.cartesianlayer .trace path, .cartesianlayer .heatmaplayer image')].some(mark => {{
        const box = mark.getBoundingClientRect();
        return box.width + box.height > 0; }})).map(figure => figure.dataset.chart)"""

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
    # As with a mouse, without which the bar of a chart would always be shown.
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,"
    "availablePointerTypes=4",
)


class Browser:
    def __init__(self, profile):
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        assert program, "needs a Chromium on the PATH (Debian: apt-get install chromium)"
        read, self._commands = os.pipe()
        self._answers, write = os.pipe()
        # Chromium looks for the two ends at 3 and 4.
        words = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", program, *FLAGS]
        nothing: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        words += [f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(words, pass_fds=(read, write), **nothing)
        os.close(read)
        os.close(write)
        self._held, self._last = b"", 0
        self.events: list[dict[str, Any]] = []

    def send(self, method, session=None, **parameters):
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
        try:
            self.send("Browser.close")
        except (OSError, AssertionError):
            self._process.kill()
        self._process.wait(timeout=600)
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
        return self.browser.send(method, self._session, **parameters)

    def _seen(self, method):
        events = [event for event in self.browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in events if event.get("method") == method]

    @property
    def complaints(self):
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [str(event) for kind in kinds for event in self._seen(kind)]

    @property
    def requests(self):
        urls = [event["request"]["url"] for event in self._seen("Network.requestWillBeSent")]
        page = self._file.as_uri()
        return [url for url in urls if url != page and not url.startswith(("data:", "blob:"))]

    def ask(self, expression):
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression):
        wait_for(lambda: self.ask(expression), shown=lambda: expression)

    def press(self, key, code=0):
        for kind in ("keyDown", "keyUp"):
            about = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            about |= {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", **about)

    def resize(self, height):
        size = {"width": self._width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def draw(self):
        """Make the window as high as the page, so that every chart is near, and wait for them."""
        self.resize(self.ask("document.documentElement.scrollHeight") + 100)
        self.until(f"{DRAWN}.length === {CHARTS}.length")
        return set(self.ask(DRAWN))

    def picture(self, height=None):
        height = height or self.ask("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": self._width, "height": height, "scale": 1}
        shot = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


def main(folder, picture, width=1280, height=None):
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(profile)
        try:
            page = Page(browser, write(Path(folder)), int(width))
            page.draw()
            Path(picture).write_bytes(page.picture(height and int(height)))
        finally:
            browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
