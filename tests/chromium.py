"""Chromium for tests: headless, driven through its DevTools protocol, with a folder of its own."""

import base64
import json
import os
import re
import shutil
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
from websockets.sync.client import connect

START_S = 60.0
ANSWER_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium_path() -> str:
    """The browser; tests fail, with what to do, where there is none."""
    named = os.environ.get("ECHOSTORE_CHROMIUM")
    found = named or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(
            "the browser's leaf is tested in Chromium, and there is none: run `make browser`, "
            "install it ('apt install chromium'), or name it in ECHOSTORE_CHROMIUM."
        )
    return found


class BrowserError(Exception):
    """The browser could not do that: most often, because the page is just being changed."""


class Chromium:
    """One browser process."""

    def __init__(self, folder: Path) -> None:
        self._open = ExitStack()
        self._process = subprocess.Popen(
            [
                chromium_path(),
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--remote-debugging-port=0",
                "--window-size=900,700",
                f"--user-data-dir={folder / 'profile'}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
        )
        try:
            self._socket = self._open.enter_context(connect(self._address(), max_size=None, proxy=None))
        except BaseException:
            self._process.kill()
            raise
        self._numbers = 0

    def _address(self) -> str:
        """Where it listens, as it says once it does."""
        assert self._process.stderr is not None
        lines: list[str] = []
        killer = threading.Timer(START_S, self._process.kill)
        killer.start()
        try:
            for line in self._process.stderr:
                lines.append(line)
                found = re.search(r"DevTools listening on (ws://\S+)", line)
                if found:
                    self._listening = threading.Thread(target=self._process.stderr.read, daemon=True)
                    self._listening.start()
                    return found[1]
        finally:
            killer.cancel()
        pytest.fail(f"Chromium did not start: {''.join(lines)[-3000:]}")

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        self._numbers += 1
        message = {"id": self._numbers, "method": method, "params": parameters}
        self._socket.send(json.dumps(message if session is None else {**message, "sessionId": session}))
        while True:
            answer = json.loads(self._socket.recv(timeout=ANSWER_S))
            if answer.get("id") == self._numbers:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def tab(self, url: str) -> "Tab":
        target = self.call("Target.createTarget", url=url)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Tab(self, target, session)

    def close(self) -> None:
        self._open.close()
        self._process.kill()
        self._process.wait()
        self._listening.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Tab:
    """One page."""

    def __init__(self, browser: Chromium, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session

    def run(self, script: str) -> Any:
        """What an expression gives, promises awaited."""
        result = self._browser.call(
            "Runtime.evaluate", self._session, expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise BrowserError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def look(self, script: str) -> Any:
        """As `run`, for a page that may not be there yet: None then."""
        try:
            return self.run(script)
        except BrowserError:
            return None

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        """Into a field, as a person does."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self._browser.call("Input.insertText", self._session, text=text)
        for kind in ("rawKeyDown", "char", "keyUp"):
            self._browser.call(
                "Input.dispatchKeyEvent", self._session, type=kind, key="Enter", code="Enter",
                windowsVirtualKeyCode=13, text="\r",
            )  # fmt: skip

    def picture(self, path: Path) -> None:
        data = self._browser.call("Page.captureScreenshot", self._session, format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def reload(self) -> None:
        self._browser.call("Page.reload", self._session)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
