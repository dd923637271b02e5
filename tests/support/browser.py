"""A browser driven over the WebDriver protocol: Chromium and its driver, where the machine has them."""

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
KEYS = {"enter": "\ue007", "escape": "\ue00c", "shift": "\ue008"}


def missing() -> str:
    """Why no browser can be driven here; empty where one can."""
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(names)} on PATH" if names else ""


class Browser:
    """One window."""

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
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
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

    def ask(self, path: str, **body: Any) -> Any:
        """One command of the protocol."""
        reply = self.http.post(f"{self.at}/{path}", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["value"]

    def open(self, url: str) -> None:
        self.ask("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.ask("execute/sync", script=script, args=list(arguments))

    def find(self, selector: str) -> str:
        element: str = self.ask("element", using="css selector", value=selector)[ELEMENT]
        return element

    def click(self, selector: str) -> None:
        self.ask(f"element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self.ask(f"element/{self.find(selector)}/value", text=text)

    def hover(self, selector: str) -> None:
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": {ELEMENT: self.find(selector)}}
        self.ask("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def text(self, selector: str) -> str:
        found: str = self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return found

    def wait(self, script: str, seconds: float = 120) -> Any:
        """What a script returns once that is something."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}; the page says: {self.text('body')[-600:]}"
            time.sleep(0.05)
        return found

    def complaints(self) -> list[str]:
        """What the console got at the level of errors: refused resources among them."""
        return [line["message"] for line in self.ask("se/log", type="browser") if line["level"] == "SEVERE"]

    def shoot(self, path: Path) -> None:
        """A picture of the window."""
        path.write_bytes(base64.b64decode(self.http.get(f"{self.at}/screenshot").json()["value"]))

    def size(self, width: int, height: int) -> None:
        """Make the page as wide and high as a device of this size, also narrower than a window can be."""
        told = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=told)

    def close(self) -> None:
        self.http.delete(self.at)
        self.driver.terminate()
        self.driver.wait(20)
