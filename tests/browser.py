"""A real Chromium, driven over a pipe by its own protocol: no package beside the browser is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --remote-debugging-pipe about:blank"
)


def chromium() -> str | None:
    """Where the browser is, if there is one."""
    return os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one tab."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._profile = tempfile.mkdtemp(prefix="casemate-browser-")
        self.problems: list[str] = []
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = f'exec "{chromium()}" --user-data-dir="{self._profile}" {FLAGS} 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb")
        self._number, self._rest, self._tab = 0, b"", None
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._tab = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._out.close()
        self._in.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def look(self, width: int, height: int = 900, dark: bool = False, scale: float = 1.0) -> None:
        """The size of the screen, and whether it is night."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self._send("Emulation.setDeviceMetricsOverride", size)
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._send("Emulation.setEmulatedMedia", {"features": media})

    def scripts(self, on: bool) -> None:
        """Whether pages may run theirs."""
        self._send("Emulation.setScriptExecutionDisabled", {"value": not on})

    def go(self, address: str) -> None:
        """Opens a page, and waits for it."""
        self.js("window.__before = true")
        found = self._send("Page.navigate", {"url": address})
        assert "errorText" not in found, found["errorText"]
        self.loaded()

    def loaded(self) -> None:
        self.wait("!window.__before && document.readyState === 'complete'")

    def js(self, expression: str):
        """The value of an expression in the page."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self._send("Runtime.evaluate", asked)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float | None = None) -> None:
        """Until an expression is true."""
        end = time.monotonic() + (timeout_s or self._timeout_s)
        while True:
            try:
                if self.js(f"Boolean({expression})"):
                    return
            except RuntimeError as error:
                if "context" not in str(error).lower():  # between two pages there is none
                    raise
            assert time.monotonic() < end, f"never true: {expression}; the page says {self.text()[:800]}"
            time.sleep(0.1)

    def text(self) -> str:
        return self.js("document.body ? document.body.innerText : ''")

    def click(self, selector: str) -> None:
        """Clicks where an element is, as a mouse would."""
        self.js(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.js(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            at = {"type": kind, "x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self._send("Input.dispatchMouseEvent", at)

    def follow(self, selector: str) -> None:
        """Clicks, and waits for the page it leads to."""
        self.js("window.__before = true")
        self.click(selector)
        self.loaded()

    def type(self, text: str) -> None:
        self._send("Input.insertText", {"text": text})

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        """One key."""
        for kind in ("keyDown", "keyUp"):
            told = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self._send("Input.dispatchKeyEvent", told | ({"text": text} if text and kind == "keyDown" else {}))

    def enter(self) -> None:
        """The enter key, and the page it leads to."""
        self.js("window.__before = true")
        self.press("Enter", 13, "\r")
        self.loaded()

    def picture(self, path: Path, whole: bool = True) -> None:
        """A picture of the page, as long as it is."""
        found = self._send(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole} | self._clip(whole)
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _clip(self, whole: bool) -> dict:
        if not whole:
            return {}
        size = self._send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}}

    def _send(self, method: str, params: dict | None = None) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params or {}}
        if self._tab:
            message["sessionId"] = self._tab
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            found = self._read()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]
            self._note(found)

    def _note(self, event: dict) -> None:
        """Keeps what the browser complains about: errors of scripts, and what the policy has stopped."""
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("text")))
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            piece = os.read(self._in.fileno(), 1 << 16)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
