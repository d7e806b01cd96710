"""Headless Chromium for tests, by its own protocol over a pipe: nothing else is needed.

Source: https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import itertools
import json
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Seconds to wait for an answer, as long as the tests of a project wait for a process.
PATIENCE = 600


class Browser:
    """A page of a browser; ``events``: what it has told, by method and parameters."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers, self._rest = requests, answers, b""
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method, and return its result; events are kept meanwhile."""
        number = next(self._numbers)
        request = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while (message := self._read()).get("id") != number:
            self._keep(message)
        assert "error" not in message, (method, message["error"])
        result: dict[str, Any] = message["result"]
        return result

    def wait_for(self, method: str) -> None:
        """Wait for an event that is still to come."""
        while self._keep(self._read()) != method:
            pass

    def _keep(self, message: dict[str, Any]) -> str:
        method: str = message.get("method", "")
        self.events.append((method, message.get("params", {})))
        return method

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready = select.select([self._answers], [], [], PATIENCE)[0]
            chunk = os.read(self._answers, 1 << 20) if ready else b""
            assert chunk, "the browser has ended, or does not answer"
            self._rest += chunk
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def open(self, page: Path, width: int, height: int, scheme: str = "light") -> None:
        """Show a file in a window of a size, in ``"light"`` or ``"dark"`` mode."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])
        self.events.clear()
        self.send("Page.navigate", url=page.resolve().as_uri())
        if not any(method == "Page.loadEventFired" for method, _ in self.events):
            self.wait_for("Page.loadEventFired")
        self.run("Promise.all([...document.querySelectorAll('.plot')].map(drawn))")

    def run(self, expression: str) -> Any:
        """The value of an expression; ``drawn(plot)`` waits for a plot, or its error."""
        helper = (
            "globalThis.drawn ??= (plot) => new Promise((done) => { const look = () => "
            "plot.querySelector('svg') || plot.textContent ? done(1) : setTimeout(look, 20); "
            "look(); });"
        )
        asked = {"expression": helper + expression, "awaitPromise": True, "returnByValue": True}
        response = self.send("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, **_CODES[key])

    def screenshot(self, file: Path) -> None:
        """Write what is seen into a file of WebP, a third of the size of PNG."""
        answer = self.send("Page.captureScreenshot", format="webp", quality=65)
        file.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])

    def problems(self) -> list[str]:
        """Errors and warnings of the console since the page was opened."""
        problems = []
        for method, parameters in self.events:
            if method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
                problems.append(json.dumps(parameters["args"]))
            if method == "Runtime.exceptionThrown":
                problems.append(json.dumps(parameters["exceptionDetails"]))
            if method == "Log.entryAdded":
                problems.append(parameters["entry"]["text"])
        return problems

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened, without the page's own."""
        asked = [params["request"]["url"] for method, params in self.events if "request" in params]
        return [url for url in asked[1:] if not url.startswith("data:")]


_CODES: dict[str, dict[str, Any]] = {
    "Tab": {"windowsVirtualKeyCode": 9},
    "Enter": {"windowsVirtualKeyCode": 13, "text": "\r"},
}


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser, with a folder for what it keeps."""
    (ours_out, theirs_in), (theirs_out, ours_in) = os.pipe()[::-1], os.pipe()[::-1]
    # Chromium reads the descriptor 3 and writes 4.
    shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    options = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    options += ["--no-first-run", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
    options += ["--no-sandbox"]  # which root, and a container, have not
    process = subprocess.Popen(
        ["bash", "-c", shell, "chromium", "chromium", *options],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        process.kill()
        process.wait()
        os.close(ours_out)
        os.close(ours_in)
