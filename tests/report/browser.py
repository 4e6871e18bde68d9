"""A headless Chromium, driven over the DevTools protocol through a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.house.tree import ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell", "chrome")
INSTALLED = ROOT / "build" / "browser" / "chromium"
"""Where `make browser` puts one."""

SECONDS = 30
"""A browser that has not answered by then hangs; on two busy cores an answer takes less than one."""


def find() -> str | None:
    """The browser that `make browser` installed, else one that this machine has."""
    return str(INSTALLED) if INSTALLED.exists() else next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page.

    Args:
        process: the browser.
        requests: where commands are written; each is a JSON object and a zero byte.
        answers: where answers and events are read, likewise.
    """

    def __init__(self, process: subprocess.Popen[bytes], requests: int, answers: int) -> None:
        self._process = process
        self._requests = os.fdopen(requests, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._count = 0
        self._session: str | None = None
        self._unread = b""
        self.errors: list[str] = []
        self.requested: list[str] = []

    def attach(self) -> None:
        """Open a page, and hear of its errors and of what it asks the network for."""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._requests.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self._hear(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, page: Path) -> None:
        """Load a file and wait until it is shown."""
        self.command("Page.navigate", url=page.as_uri())
        while (event := self._read()).get("method") != "Page.loadEventFired":
            self._hear(event)

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript; promises are waited for."""
        given = {"expression": script, "awaitPromise": True, "returnByValue": True}
        result = self.command("Runtime.evaluate", **given)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key, by the name that events give it."""
        code = _CODES.get(key, ord(key.upper()) if len(key) == 1 else 0)
        held = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        self.command("Input.dispatchKeyEvent", type="keyDown", **held, **text)
        self.command("Input.dispatchKeyEvent", type="keyUp", **held)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.command("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        """Make the window so large."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """What the system prefers: `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._answers.close()

    def _hear(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Network.requestWillBeSent":
                self.requested.append(event["params"]["request"]["url"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = self._answers.read(1 << 16)
            assert more, "the browser went away"
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)


_CODES = {"Enter": 13, "Tab": 9, "Escape": 27, "Home": 36, "End": 35, "PageDown": 34, "PageUp": 33}
_CODES |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "/": 191}


@contextmanager
def browsing(executable: str, folder: Path) -> Generator[Browser]:
    """A browser with an empty profile in `folder`, which ends with the block."""
    ours, theirs = os.pipe(), os.pipe()

    def wire() -> None:
        # The protocol reads from descriptor 3 and writes to 4, and the pipes may lie on just these.
        reads, writes = os.dup(ours[0]), os.dup(theirs[1])
        os.dup2(reads, 3)
        os.dup2(writes, 4)

    process = subprocess.Popen(
        [executable, "--headless", "--no-sandbox", "--no-zygote", "--disable-gpu", "--in-process-gpu",
         "--single-process", "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe",
         f"--user-data-dir={folder}"],
        preexec_fn=wire, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(ours[0])
    os.close(theirs[1])
    browser = Browser(process, ours[1], theirs[0])
    try:
        browser.attach()
        yield browser
    finally:
        browser.close()
