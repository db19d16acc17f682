"""`echostore serve` that also writes down what its peer does: `python recorded_serve.py HISTORY NAME serve ...`.

The command itself is the real one; see `echostore.testing.history_recorder` for what is recorded and how. With LAB_FORKS set
the device means harm: it goes on with its old feeds though its disk was rolled back.
"""

import os
import sys
from pathlib import Path

from echostore.cli.app import run
from echostore.peer.opening import PartyOpener
from echostore.testing.history_recorder import record_histories

if __name__ == "__main__":
    if os.environ.get("LAB_FORKS"):
        PartyOpener.must_renew = lambda opener, feeds: False  # type: ignore[method-assign]
    record_histories(Path(sys.argv[1]), sys.argv[2])
    sys.exit(run(sys.argv[3:]))
