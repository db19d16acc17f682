"""The log of a service: every line on stderr is an event, whoever wrote it."""

import json
import subprocess
import sys
from typing import Any

NOISE = """
import asyncio, gc, logging, threading, warnings
from echostore.cli.service_log import log_to_stderr
log_to_stderr({form!r}, quiet=False)

async def fail():
    raise ValueError("two\\nlines")

async def main():
    task = asyncio.get_running_loop().create_task(fail())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task
    gc.collect()

asyncio.run(main())

def end():
    raise RuntimeError("the thread is over")

thread = threading.Thread(target=end, name="worker")
thread.start()
thread.join()

class Finalized:
    def __del__(self):
        raise KeyError("late")

Finalized()
warnings.warn("old", DeprecationWarning)
logging.getLogger("websockets.server").warning("a peer\\nspoke")
logging.getLogger("echostore.service").info("serving", extra={{"home": "/x"}})
try:
    raise OSError("ours")
except OSError:
    logging.getLogger("echostore.mesh").exception("a link failed")
"""


def said(form: str) -> list[str]:
    code = NOISE.format(form=form)
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stderr.splitlines()


def events() -> dict[str, dict[str, Any]]:
    return {event["event"]: event for event in map(json.loads, said("json"))}


def test_every_line_of_the_json_log_is_an_event() -> None:
    lines = [json.loads(line) for line in said("json")]
    assert [event["event"] for event in lines] == [
        "a task failed",
        "a thread failed",
        "a finalizer failed",
        "a library said",
        "a library said",
        "serving",
        "a link failed",
    ]
    assert all({"time", "level", "part"} <= event.keys() for event in lines)


def test_a_failed_task_is_one_line_with_its_error_and_traceback() -> None:
    failed = events()["a task failed"]
    assert failed["part"] == "asyncio"
    assert failed["error"] == "ValueError: two\nlines"
    assert "never retrieved" in failed["what"]
    assert "in fail" in failed["traceback"]


def test_a_failed_thread_is_named() -> None:
    failed = events()["a thread failed"]
    assert (failed["thread_name"], failed["error"]) == ("worker", "RuntimeError: the thread is over")


def test_the_text_log_says_the_same() -> None:
    text = "\n".join(said("text"))
    for event in ("a task failed", "a thread failed", "a finalizer failed", "a library said", "serving home=/x"):
        assert event in text
