"""A thread that runs the application's functions: they may call back, wait or fail, and nothing here waits for them."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Teller:
    """Started when there is something to tell."""

    def __init__(self) -> None:
        self._work: deque[tuple[Callable[[Any], object], Any]] = deque()
        self.quiet = threading.Condition()
        """Nothing is told to the application while somebody holds it."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, fn: Callable[[Any], object], what: Any) -> None:
        with self.quiet:
            self._work.append((fn, what))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="echostore-thin-tell", daemon=True)
                self._thread.start()
            self.quiet.notify()

    def _run(self) -> None:
        while True:
            with self.quiet:
                self.quiet.wait_for(lambda: self._work or self._closed)
                if not self._work:
                    return
                fn, what = self._work.popleft()
            try:
                fn(what)
            except Exception as error:  # noqa: BLE001  # of the application: shown as Python shows it, the next goes on
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread)))

    def close(self) -> None:
        with self.quiet:
            self._closed = True
            self.quiet.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
