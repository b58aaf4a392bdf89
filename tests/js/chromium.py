"""Drives a headless Chromium through a pipe, with the DevTools protocol: JSON messages that end in a zero byte.

The browser is `TREERING_CHROMIUM`, or one on the PATH. A driver from a package index would bring a browser of its own.
"""

import base64
import contextlib
import fcntl
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = os.environ.get("TREERING_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
MISSING = "expected Chromium on the PATH or in TREERING_CHROMIUM, found none"
_OPTIONS = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
_OPTIONS += ["disable-dev-shm-usage", "remote-debugging-pipe"]
_SECONDS = 60
# Gives the browser the pipes as the descriptors 3 and 4. It is a program: a function would fork a process with threads.
_CONNECT = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """A browser that runs. `requests` has the URLs that its pages asked for, `errors` what they logged as errors."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._number, self._buffer = 0, b""
        self.requests: list[str] = []
        self.errors: list[str] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Returns the result of a method. Raises `RuntimeError` for its error."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._writing, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            answer = self._next()
            if answer and answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
        raise TimeoutError(f"{method}: expected an answer in {_SECONDS} s, found none")

    def _next(self) -> dict[str, Any] | None:
        """Returns the next message, or None if none came within a second. Notes what pages ask for and log."""
        while b"\0" not in self._buffer:
            if not select.select([self._reading], [], [], 1)[0]:
                return None
            data = os.read(self._reading, 1 << 20)
            if not data:
                raise RuntimeError("expected a browser that runs, found that it has ended")
            self._buffer += data
        one, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(one)
        about = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        if message.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(about["entry"]["text"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(about["exceptionDetails"]))
        return message

    def page(self, url: str, *, width: int = 1200, dark: bool = False) -> "Page":
        """Opens a page of this width."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.call("Emulation.setEmulatedMedia", features=features)
        page.call("Page.navigate", url=url)
        page.wait("document.readyState === 'complete'")
        return page


class Page:
    """A page of a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self._session, **parameters)

    def run(self, expression: str) -> Any:
        """Returns the value of an expression. Raises `RuntimeError` if it raises."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Waits until an expression is true, and returns its value; True for an element."""
        expression = f"((found) => found instanceof Node || found)({expression})"
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            if value := self.run(expression):
                return value
            time.sleep(0.02)
        raise TimeoutError(f"expected {expression} in {_SECONDS} s, found {self.run('document.body.innerText')[:2000]}")

    def texts(self, selector: str) -> list[str]:
        """Returns the texts of the elements."""
        return self.run(f"Array.from(document.querySelectorAll({json.dumps(selector)}), (one) => one.textContent)")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def key(self, name: str) -> None:
        """Presses a key."""
        text = {"Enter": "\r"}.get(name, name if len(name) == 1 else "")
        code = {"Enter": 13}.get(name, 0)
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, text=text, windowsVirtualKeyCode=code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        """Inserts text where the focus is."""
        self.call("Input.insertText", text=text)

    def drop(self, selector: str, *paths: os.PathLike[str]) -> None:
        """Drops files and folders on an element, as a user does."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.run(f"((box) => [box.left + 5, box.top + 5])({box})")
        data = {"items": [], "files": [os.fspath(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def pick(self, selector: str, *paths: os.PathLike[str]) -> None:
        """Chooses files for an input."""
        found = self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        files = [os.fspath(path) for path in paths]
        self.call("DOM.setFileInputFiles", objectId=found["result"]["objectId"], files=files)

    def picture(self, path: pathlib.Path) -> None:
        """Writes a picture of all of the page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser(folder: pathlib.Path) -> Iterator[Browser]:
    """Yields a browser whose profile is in `folder`."""
    assert BROWSER, MISSING
    theirs, writing = os.pipe()
    reading, theirs_too = os.pipe()
    high = [fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 10) for pipe in (theirs, theirs_too)]
    command = [sys.executable, "-ISc", _CONNECT, *map(str, high), BROWSER, *(f"--{name}" for name in _OPTIONS)]
    command += [f"--user-data-dir={folder / 'profile'}", "about:blank"]
    environment = {**os.environ, "HOME": str(folder)}
    with (
        (folder / "browser.log").open("wb") as log,
        subprocess.Popen(command, stderr=log, pass_fds=high, env=environment) as process,
    ):
        for pipe in (theirs, theirs_too, *high):
            os.close(pipe)
        try:
            yield Browser(reading, writing)
        finally:
            process.terminate()
            for pipe in (reading, writing):
                os.close(pipe)
