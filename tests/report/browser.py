"""A headless Chromium driven over a pipe: no port, no driver, nothing but the standard library.

Chromium's ``--remote-debugging-pipe`` reads commands of the DevTools protocol from file 3 and
writes answers and events to file 4, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
_ANSWER_S = 120.0
# Puts the pipe's two ends where Chromium looks for them, then becomes Chromium.
_START = "import os,sys;a=sys.argv;os.dup2(int(a[1]),3);os.dup2(int(a[2]),4);os.execvp(a[3],a[3:])"


def chromium() -> str | None:
    """The browser's program, where there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One Chromium with a profile of its own."""

    def __init__(self, program: str, profile: Path) -> None:
        read, self._commands = os.pipe()
        self._answers, write = os.pipe()
        # Above 4, so that putting one in its place does not close the other.
        ends = [os.dup(end) for end in (read, write)]
        spare = [os.dup(end) for end in ends] if min(ends) <= 4 else ends
        starter = [sys.executable, "-c", _START, str(spare[0]), str(spare[1])]
        profile_flag = f"--user-data-dir={profile}"
        self._process = subprocess.Popen(
            [*starter, program, *FLAGS, profile_flag, "about:blank"],
            pass_fds=spare,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in {read, write, *ends, *spare}:
            os.close(end)
        self._held = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer; events that come before it are kept."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(_ANSWER_S)
            if answer is None:
                raise TimeoutError(f"{method}: no answer in {_ANSWER_S} s")
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def settle(self, seconds: float) -> None:
        """Collect events for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            event = self._receive(left)
            if event is not None:
                self.events.append(event)

    def close(self) -> None:
        """End Chromium and all of its processes."""
        try:
            self.send("Browser.close")
        except (OSError, TimeoutError, EOFError):
            self._process.kill()
        self._process.wait(timeout=120)
        os.close(self._commands)
        os.close(self._answers)

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._answers], [], [], max(seconds, 0))
            if not ready:
                return None
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise EOFError("the browser ended")
            self._held += part
        text, self._held = self._held.split(b"\0", 1)
        return dict(json.loads(text))


@dataclass
class Page:
    """One tab, with all that it logged and asked for.

    Attributes:
        browser: it belongs to.
        file: that is shown.
        complaints: exceptions, console output and log entries, in words.
        requests: addresses asked for beyond the page itself.
    """

    browser: Browser
    session: str
    file: Path
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @classmethod
    def show(
        cls,
        browser: Browser,
        file: Path,
        width: int = 1280,
        height: int = 900,
        scripts: bool = True,
    ) -> Page:
        """Open a file in a new tab and wait until it is loaded."""
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=target, flatten=True)
        page = cls(browser, attached["sessionId"], file)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        page.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        page.send("Page.navigate", url=file.as_uri())
        end = time.monotonic() + _ANSWER_S
        while not page.seen("Page.loadEventFired") and time.monotonic() < end:
            browser.settle(0.05)
        if scripts:
            page.draws()
        page.take(file)
        return page

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to this tab."""
        return self.browser.send(method, self.session, **parameters)

    def seen(self, method: str) -> list[dict[str, Any]]:
        """The parameters of all events of one kind in this tab."""
        return [
            event.get("params", {})
            for event in self.browser.events
            if event.get("method") == method and event.get("sessionId") == self.session
        ]

    def take(self, file: Path) -> None:
        """Sort what the tab reported into complaints and requests."""
        self.complaints = [
            *(str(event["exceptionDetails"]) for event in self.seen("Runtime.exceptionThrown")),
            *(str(event["args"]) for event in self.seen("Runtime.consoleAPICalled")),
            *(str(event["entry"]) for event in self.seen("Log.entryAdded")),
        ]
        asked = [event["request"]["url"] for event in self.seen("Network.requestWillBeSent")]
        # Addresses with the data in themselves, or of what the page made, are asked of nobody.
        inner = ("data:", "blob:")
        self.requests = [url for url in asked if url != file.as_uri() and not url.startswith(inner)]

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def draws(self) -> None:
        """Wait until the page has drawn what is under way: two frames."""
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.send("Runtime.evaluate", expression=frames, awaitPromise=True)

    def press(self, key: str, code: int = 0, shift: bool = False) -> None:
        """A key, as a hand would."""
        text = "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float, *, to: tuple[float, float] | None = None) -> None:
        """Press the left button at a place and let go there, or at another one."""
        self.point(x, y)
        for kind, at in (("mousePressed", (x, y)), ("mouseReleased", to or (x, y))):
            if at != (x, y):
                for part in (0.3, 0.6, 1.0):
                    self._mouse("mouseMoved", x + (at[0] - x) * part, y + (at[1] - y) * part, 1)
            self._mouse(kind, *at, 1)

    def _mouse(self, kind: str, x: float, y: float, buttons: int) -> None:
        held = {"button": "left", "buttons": buttons, "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)

    def until(self, expression: str, seconds: float = 120) -> Any:
        """The value of an expression once it is true; the last one if it does not become so."""
        end = time.monotonic() + seconds
        while not (value := self.ask(expression)) and time.monotonic() < end:
            self.browser.settle(0.05)
        return value

    def resize(self, width: int, height: int) -> None:
        """The size of the window, in pixels of style sheets."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def printed(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self.send("Page.printToPDF", preferCSSPageSize=True)["data"])
