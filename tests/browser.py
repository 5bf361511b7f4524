"""Controls a real Chromium over its DevTools protocol, without further packages."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --remote-debugging-pipe about:blank"
)

CONTRAST = """
(() => {
  const parse = (c) => { const m = c.match(/[\\d.]+/g).map(Number); return m.length < 4 ? [...m, 1] : m; };
  const light = ([r, g, b]) => {
    const f = [r, g, b].map((v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2];
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c[3] === 1) return c;
    }
    return parse(getComputedStyle(document.body).backgroundColor);
  };
  const found = new Map();
  for (const e of document.querySelectorAll("main *, header *")) {
    if (e.closest("svg") || ![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    if (!e.getClientRects().length) continue;
    const style = getComputedStyle(e);
    const [a, b] = [light(parse(style.color)), light(behind(e))].sort((x, y) => y - x);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    const ratio = (a + 0.05) / (b + 0.05);
    const name = `${e.tagName}.${e.className}: ${e.textContent.slice(0, 30)}`;
    if (ratio < (large ? 3 : 4.5)) found.set(name, ratio.toFixed(2));
  }
  return [...found];
})()
"""
"""Texts with too little contrast to their background (WCAG 2.1, AA), with the contrast ratio."""


AXE_RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


def axe() -> str | None:
    """Returns the script of axe-core: the file in the variable AXE, or that of the development environment."""
    package = find_spec("axe_playwright_python")
    places = package.submodule_search_locations if package else None
    path = os.environ.get("AXE") or (places and f"{places[0]}/axe.min.js")
    return Path(path).read_text(encoding="utf-8") if path else None


def chromium() -> str | None:
    """Returns the path of the browser, or none if it is not installed."""
    return os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """A browser with one tab."""

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

    def set_screen(self, width: int, height: int = 900, dark: bool = False, scale: float = 1.0) -> None:
        """Sets screen size and color scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self._send("Emulation.setDeviceMetricsOverride", size)
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._send("Emulation.setEmulatedMedia", {"features": media})

    def scripts(self, on: bool) -> None:
        """Enables or disables scripts."""
        self._send("Emulation.setScriptExecutionDisabled", {"value": not on})

    def go(self, address: str) -> None:
        """Opens a page, and waits until it is loaded."""
        self.js("window.__before = true")
        found = self._send("Page.navigate", {"url": address})
        assert "errorText" not in found, found["errorText"]
        self.loaded()

    def loaded(self) -> None:
        self.wait("!window.__before && document.readyState === 'complete'")

    def js(self, expression: str):
        """Evaluates an expression in the page."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self._send("Runtime.evaluate", asked)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float | None = None) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + (timeout_s or self._timeout_s)
        while True:
            try:
                if self.js(f"Boolean({expression})"):
                    return
            except RuntimeError as error:
                if "context" not in str(error).lower():  # during navigation there is no context
                    raise
            assert time.monotonic() < end, f"timed out: {expression}; text of the page: {self.text()[:800]}"
            time.sleep(0.1)

    def text(self) -> str:
        return self.js("document.body ? document.body.innerText : ''")

    def click(self, selector: str) -> None:
        """Clicks an element with the mouse."""
        self.js(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.js(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            at = {"type": kind, "x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self._send("Input.dispatchMouseEvent", at)

    def follow_link(self, selector: str) -> None:
        """Clicks, and waits for the page that loads."""
        self.js("window.__before = true")
        self.click(selector)
        self.loaded()

    def type(self, text: str) -> None:
        self._send("Input.insertText", {"text": text})

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            key_event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self._send("Input.dispatchKeyEvent", key_event | ({"text": text} if text and kind == "keyDown" else {}))

    def enter(self) -> None:
        """Presses Enter, and waits for the page that loads."""
        self.js("window.__before = true")
        self.press("Enter", 13, "\r")
        self.loaded()

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Saves a screenshot of the page."""
        found = self._send(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole} | self._clip(whole)
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def violations(self, script: str) -> list[str]:
        """Runs axe-core on the page. Returns the violated rules with their first elements."""
        self.js(f"{script};0")
        return self.js(
            f"axe.run(document, {{runOnly: {json.dumps(AXE_RULES)}}}).then((found) => found.violations.map((v) => "
            "v.id + ': ' + v.nodes.slice(0, 3).map((n) => n.html.slice(0, 120)).join(' | ')))"
        )

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
            self._record_problem(found)

    def _record_problem(self, event: dict) -> None:
        """Records script errors and violations of the security policy."""
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
