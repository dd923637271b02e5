"""Chromium controlled over the WebDriver protocol, if it is installed."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from textmill.verification.launcher import free_port

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {
    "enter": "\ue007",
    "escape": "\ue00c",
    "shift": "\ue008",
    "tab": "\ue004",
    "left": "\ue012",
    "right": "\ue014",
    "backspace": "\ue003",
}


def missing() -> str:
    """Return why no browser can be used; an empty string if one can."""
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(names)} on PATH" if names else ""


class Browser:
    """A browser window."""

    def __init__(self, width: int = 1200, height: int = 800) -> None:
        port = free_port()
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)
        self._wait_up()
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--window-size={width},{height}",
        ]
        options = {"binary": shutil.which("chromium"), "args": arguments}
        capabilities = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.http.post("/session", json={"capabilities": {"alwaysMatch": capabilities}}).json()["value"]
        self.at = f"/session/{session['sessionId']}"

    def _wait_up(self) -> None:
        end = time.monotonic() + 120
        while True:
            try:
                if self.http.get("/status").json()["value"]["ready"]:
                    return
            except httpx.HTTPError:
                pass
            assert time.monotonic() < end, "chromedriver did not start"
            time.sleep(0.05)

    def send(self, path: str, **body: Any) -> Any:
        """Send a WebDriver command."""
        reply = self.http.post(f"{self.at}/{path}", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["value"]

    def open(self, url: str) -> None:
        self.send("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script; return its value."""
        return self.send("execute/sync", script=script, args=list(arguments))

    def find(self, selector: str) -> str:
        element: str = self.send("element", using="css selector", value=selector)[ELEMENT]
        return element

    def click(self, selector: str) -> None:
        self.send(f"element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self.send(f"element/{self.find(selector)}/value", text=text)

    def press(self, keys: str, held: str = "") -> None:
        """Press keys one after the other, whatever has the focus, while `held` is down."""
        steps = [{"type": "keyDown", "value": key} for key in held]
        for key in keys:
            steps += [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        steps += [{"type": "keyUp", "value": key} for key in held]
        self.send("actions", actions=[{"type": "key", "id": "keyboard", "actions": steps}])

    def tab_to(self, selector: str) -> None:
        """Press the tab key until an element has the focus."""
        for _ in range(200):
            if self.run("return document.activeElement.matches(arguments[0])", selector):
                return
            self.press(KEYS["tab"])
        raise AssertionError(f"the tab key never reaches {selector}")

    def hover(self, selector: str) -> None:
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": {ELEMENT: self.find(selector)}}
        self.send("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def text(self, selector: str) -> str:
        found: str = self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return found

    def wait(self, script: str, seconds: float = 120) -> Any:
        """Run a script until its value is true; return that value."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}; the page says: {self.text('body')[-600:]}"
            time.sleep(0.05)
        return found

    def errors(self) -> list[str]:
        """Return the errors in the console, such as refused resources."""
        return [line["message"] for line in self.send("se/log", type="browser") if line["level"] == "SEVERE"]

    def save_screenshot(self, path: Path) -> None:
        """Save a screenshot."""
        path.write_bytes(base64.b64decode(self.http.get(f"{self.at}/screenshot").json()["value"]))

    def size(self, width: int, height: int) -> None:
        """Emulate a device of this size, even one narrower than a window can be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=metrics)

    def close(self) -> None:
        self.http.delete(self.at)
        self.driver.terminate()
        self.driver.wait(20)
