"""Kill a driver at every step of a commit, for `test_commit.py`: real processes and real signals.

    python commit_kills.py FOLDER ROUNDS       prints a JSON line for each kill

Children are forked from this small process, which has imported everything already: a kill costs milliseconds.
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from echostore.pipeline.output.garbage import collect
from spark.commit_story import drive, read_whole


def driver(out: Path, deadly: int | None, report: int) -> None:
    """Run and die at the step with that number; without one, run to the end. Steps go to the pipe as they come."""
    count = 0

    def step(name: str) -> None:
        nonlocal count
        os.write(report, f"{name}\n".encode())
        if count == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    drive(out, f"writer-{deadly}", step)
    collect(out, age_s=0, now_s=1e12, step=step)


def run(out: Path, deadly: int | None) -> tuple[list[str], bool]:
    """Fork a driver; the steps it took, and whether it was killed."""
    inward, outward = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(inward)
        status = 1
        try:
            driver(out, deadly, outward)
            status = 0
        finally:
            os._exit(status)
    os.close(outward)
    with os.fdopen(inward) as pipe:
        steps = pipe.read().splitlines()
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0, (deadly, status, steps)
    return steps, killed


def main(folder: Path, rounds: int) -> None:
    for number in range(rounds):
        deadly = 0
        while True:
            out = folder / f"{number}-{deadly}"
            out.mkdir(parents=True)
            run(out, None)
            steps, killed = run(out, deadly)
            if not killed:
                break
            after_kill = read_whole(out)
            run(out, None)
            after_retry = read_whole(out)
            line = {"step": steps[-1], "after_kill": after_kill, "after_retry": after_retry}
            line["left"] = sorted(p.name for p in out.rglob("*") if p.name.endswith(".part") or p.name[0] == ".")
            line["attempts"] = len(list(out.glob("epoch=*/attempt=*")))
            sys.stdout.write(json.dumps(line) + "\n")
            deadly += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
