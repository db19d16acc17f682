"""How a failure is told, and what each code means.

    error[E-LOCKED]: ./data is open in another process (pid 4242: echostore serve). Nothing was changed. Close it there.

Always on stderr; with --json as {"version": 1, "error": {...}}, so that stdout holds results alone.
"""

import json
import sys
from dataclasses import dataclass

from echostore.cli.output import JSON_VERSION, coloured
from echostore.cli.values import harmless
from echostore.kernel.errors import EchoError, sentence

UNEXPECTED = "E-UNEXPECTED"
INTERRUPTED = "E-INTERRUPTED"
INTERRUPTED_STATUS = 130


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, in the parts that a message has."""

    code: str
    exit_status: int
    what: str
    unchanged: str = ""
    next_step: str = ""

    @staticmethod
    def of(error: EchoError) -> "Failure":
        return Failure(error.code, error.exit_status, error.what, error.unchanged, error.next_step)

    def tell(self, *, as_json: bool) -> int:
        """Print it; returns the exit status."""
        if as_json:
            fields = {
                "code": self.code,
                "exit_status": self.exit_status,
                "what": self.what,
                "unchanged": self.unchanged,
                "next_step": self.next_step,
            }
            document = {"version": JSON_VERSION, "error": fields}
            sys.stderr.write(json.dumps(document, separators=(",", ":")) + "\n")
        else:
            sentences = " ".join(sentence(part) for part in (self.what, self.unchanged, self.next_step) if part)
            # ^C is what the person wanted: no alarm.
            alarm = "" if self.code == INTERRUPTED else coloured(f"error[{self.code}]:", "1;31") + " "
            sys.stderr.write(f"{alarm}{harmless(sentences)}\n")
        return self.exit_status


EXPLANATIONS: dict[str, str] = {
    "E-FAILED": "Something could not be done, for a reason that the message gives. Exit status 1.",
    "E-USAGE": (
        "The command does not make sense as it was given: an unknown option, a missing argument, a name that fits "
        "several things, a value of the wrong kind. Nothing was opened for writing. Exit status 2.\n"
        "Add --help to the command for what it takes, with examples."
    ),
    "E-NOT-FOUND": (
        "There is no such home, party, item, feed or blob on this machine. It may exist on another member's machine. "
        "Exit status 3.\n"
        "`echostore party list`, `echostore item tree` and `echostore feed list` show what is here."
    ),
    "E-REFUSED": (
        "A permission, a policy or a rule says no: this device is no member or only a reader, the party is closed, "
        "the folder belongs to something else. Exit status 4.\n"
        "`echostore party why KEY` shows which credentials decide about a member, a device or a feed."
    ),
    "E-SCHEMA": (
        "The change would break the schema of the item's type: a required field is missing or a value has another "
        "type. It was refused before it was written. Exit status 4."
    ),
    "E-TOO-LARGE": (
        "A value, a batch or a block is beyond a limit. Limits keep one writer from making every member's peer slow. "
        "Nothing of it was written. Exit status 4.\n"
        "Write less at once, or put large content into a blob."
    ),
    "E-PASSPHRASE": (
        "The key file of the home is sealed, and no passphrase or a wrong one was given. Exit status 4.\n"
        "Type it when asked, or set ECHOSTORE_PASSPHRASE for commands that nobody watches."
    ),
    "E-TIMEOUT": (
        "What was waited for did not happen in time. What was written stays written and durable; only the wait is "
        "over. Exit status 5."
    ),
    "E-CORRUPT": (
        "Bytes on disk do not match their hash, signature or format. Exit status 6.\n"
        "`echostore doctor --full` finds every damaged place. Damaged items.db and blobs.db are derived data and are "
        "made anew; blocks of other members are fetched again; for your own last blocks a backup may be needed."
    ),
    "E-LOCKED": (
        "Another process has the home open for writing, and one home has one writer. The message names its pid. "
        "Exit status 7.\n"
        "End that process, or let it do the writing: beside a running `echostore serve` commands that write work by "
        "themselves. Commands that only read work beside any process. The lock ends with the "
        "process, however it ends: there is no stale lock to remove."
    ),
    "E-STORAGE": (
        "The disk is full, read-only or failing. What was acknowledged before is kept and can be read. On a full disk "
        "writing goes on by itself once there is space; a failing one takes no writes until the store is opened "
        "again. Exit status 1.\n"
        "`echostore doctor` shows the free space."
    ),
    "E-ENGINE": (
        "Spark could not start or gave up: no suitable Java, too little memory, a master that does not answer, a job "
        "that failed. Results appear only when a job commits, so none is half there. Exit status 1.\n"
        "`echostore doctor` checks Java, versions and memory."
    ),
    "E-UNREACHABLE": "Another peer could not be reached, or would not talk: it is not running, the address is wrong, a "
    "firewall is between, or another device answered than was expected. Make sure that the other peer listens "
    "(`echostore serve` there) and try again. Exit status 5.",
    "E-CLOSED": "The peer, party or store was closed while it was still used. Open it again. Exit status 1.",
    "E-MODEL": (
        "The model of an item raised an error. The item is set aside, its operations are kept and replicated, and "
        "every other item works on. Exit status 1."
    ),
    "E-COMPACTED": (
        "The moment asked for is not here: its blocks have not arrived yet, or an epoch replaced them by its "
        "snapshot. Exit status 3."
    ),
    UNEXPECTED: (
        "An error that echostore did not expect, which is a defect in it. What was durable before stays durable. "
        "Exit status 1.\n"
        "Repeat the command with --trace and report what it prints together with `echostore doctor`."
    ),
    INTERRUPTED: (
        "The command was ended by ^C. Every write is one transaction: it is there as a whole or not at all. Exit "
        "status 130."
    ),
}
"""What `echostore doctor CODE` says. Every code of an EchoError is here; a test holds this."""
