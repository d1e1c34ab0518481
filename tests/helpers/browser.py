"""Headless Chromium, driven through a pipe: a page as a user has it, with keys, sizes and colours."""

import itertools
import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")

# The contrast of two colors, and the background of a node.
CONTRAST = """
const root = document.documentElement;
const colour = text => (text.match(/[\\d.]+/g) || [0, 0, 0]).map(Number);
const linear = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = c => { const [r, g, b] = c.map(linear);
  return .2126 * r + .7152 * g + .0722 * b; };
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
  return (x + .05) / (y + .05); };
const behind = node => { for (; node; node = node.parentElement) {
  const c = colour(getComputedStyle(node).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c.slice(0, 3); }
  return [255, 255, 255]; };
"""


class Page:
    def __init__(self, to, back):
        self._to, self._back, self._numbers = to, back, itertools.count(1)
        self._unread, self._session = b"", None
        self.errors = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self):
        while b"\0" not in self._unread:
            some = os.read(self._back, 1 << 20)
            assert some, "the browser has ended"
            self._unread += some
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        if event.get("method") == "Log.entryAdded":
            entry = event["params"]["entry"]
            if entry["source"] != "network":  # all HTTP errors
                self.errors.append(entry["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(event["params"]["exceptionDetails"]["exception"]["description"])

    def window(self, width, height, scheme):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, script):
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script, seconds=20.0):
        deadline = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < deadline, f"{script} never became true"
            time.sleep(0.02)

    def key(self, name, code=0, modifiers=0):
        text = {"text": "\r"} if name == "Enter" else {"text": name} if len(name) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            more = {"key": name, "windowsVirtualKeyCode": code, "modifiers": modifiers, **text}
            self.call("Input.dispatchKeyEvent", type=kind, **more)


@contextmanager
def browser(folder):
    (ours_in, to), (back, ours_out) = os.pipe(), os.pipe()

    def as_three_and_four():
        high = [os.dup2(end, 100 + i) for i, end in enumerate((ours_in, ours_out))]
        for place, end in zip((3, 4), high, strict=True):
            os.dup2(end, place)
            os.set_inheritable(place, True)

    command = [BROWSER, *_OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, preexec_fn=as_three_and_four, close_fds=False, **quiet) as process:
        os.close(ours_in)
        os.close(ours_out)
        try:
            yield Page(to, back)
        finally:
            with suppress(OSError):
                os.write(to, b'{"id": 1000000, "method": "Browser.close"}\0')
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
            os.close(to)
            os.close(back)
