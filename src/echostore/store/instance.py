"""Which copy of a home this is: the guard against a device forking its own feeds by accident (FAULTS D3).

A home that was copied, or restored from a backup, holds feeds that have gone on elsewhere; appending to them would
fork them. Two records tell, one inside the home and one outside, which a copy or a backup of the home lacks:

    <home>/instance            {id, boot, machine, inode}   inode is the file's own number: a copied file has another
    <state>/instances/<id>     {boot, inode, changed, next} `changed` is the inside file's ctime, which no tool can set

`check_in` compares them at start and counts the boot in both. The answer is `same` only if everything agrees;
otherwise the home gets a new id and the caller opens new feeds. A new feed is cheap and a fork is for ever, so every
doubt is answered with a new feed: also when the outside record is lost or can't be kept (then at every start; set
ECHOSTORE_STATE to a folder that lasts). No data is lost by it: the old feeds stay, they only get no more blocks.

What is not seen: a whole disk rolled back with both records on it, and a file system snapshot of the home alone that
is rolled back to a moment within the same boot. For these a peer asks others for its own feeds' heads before it writes.

The device number is left out on purpose: some file systems get a new one at every mount.
"""

import contextlib
import hashlib
import os
import secrets
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec
import platformdirs

from echostore.kernel.errors import Corrupt
from echostore.store.durable_file import PRIVATE_FOLDER, Replacement, file_error, read_bounded, replace
from echostore.store.home import Home

RECORD_BYTES_MAX = 4096
STATE_VARIABLE = "ECHOSTORE_STATE"


class Standing(StrEnum):
    """What a start found. Anything but SAME means: write to new feeds."""

    FRESH = "fresh"
    SAME = "same"
    COPIED = "copied"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True)
class InstanceCheck:
    """The outcome of a check-in. `remembered` is False when the outside record could not be kept."""

    standing: Standing
    instance_id: str
    boot: int
    remembered: bool = True

    @property
    def may_continue_feeds(self) -> bool:
        """Whether own feeds that are in the home may get more blocks."""
        return self.standing is Standing.SAME


class _Inside(msgspec.Struct, frozen=True):
    id: str
    boot: int
    machine: str
    inode: int


class _Next(msgspec.Struct, frozen=True):
    """An inside record that is about to be put in place."""

    boot: int
    inode: int


class _Outside(msgspec.Struct, frozen=True):
    boot: int
    inode: int
    changed: int
    next: _Next | None = None


def check_in(home: Home, *, state: Path | None = None, machine: str | None = None) -> InstanceCheck:
    """Compare the two records, count this boot in both, durably. Call it once per start, with the home locked.

    Until it returns, no byte of an own feed may leave the process: that is what makes the order of writes below safe.
    """
    folder = state or state_folder()
    this_machine = machine_fingerprint() if machine is None else machine
    inside, outside = _read_inside(home.instance), None
    if inside is not None:
        outside = _read_outside(folder / inside.id)
    standing = _judge(home, inside, outside, this_machine)
    if standing is Standing.SAME:
        assert inside is not None, "the same as what?"
        identity, boot = inside.id, inside.boot + 1
    else:
        # A new id: the record of the old one belongs to the original, which may be alive elsewhere on this machine.
        identity, boot, outside = secrets.token_hex(16), 1, None
    remembered = _count_boot(home, folder, identity, boot, this_machine, outside)
    return InstanceCheck(standing, identity, boot, remembered)


def standing_of(home: Home, *, state: Path | None = None, machine: str | None = None) -> Standing:
    """What a start would find now. It counts nothing and changes nothing, so it may run beside the writer."""
    inside = _read_inside(home.instance)
    outside = None if inside is None else _read_outside((state or state_folder()) / inside.id)
    return _judge(home, inside, outside, machine_fingerprint() if machine is None else machine)


def forget_instance(home: Home, *, state: Path | None = None) -> None:
    """Remove the outside record of a home that is about to be deleted."""
    inside = _read_inside(home.instance)
    if inside is not None:
        with contextlib.suppress(FileNotFoundError):
            ((state or state_folder()) / inside.id).unlink()


def state_folder() -> Path:
    """Where outside records live: ECHOSTORE_STATE, or the user's state folder."""
    chosen = os.environ.get(STATE_VARIABLE)
    return Path(chosen or platformdirs.user_state_dir("echostore")) / "instances"


def machine_fingerprint() -> str:
    """A hash that differs between machines, empty where there is nothing to tell by. The machine's id stays private."""
    for source in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            return hashlib.sha256(b"echostore/machine/1" + read_bounded(Path(source), 1024).strip()).hexdigest()[:32]
    return ""


def _judge(home: Home, inside: _Inside | None, outside: _Outside | None, machine: str) -> Standing:
    if inside is None:
        # Feeds without a record: someone removed or damaged it, and nothing says whether the feeds went on elsewhere.
        return Standing.RESTORED if home.party_keys() else Standing.FRESH
    found = os.lstat(home.instance)
    if outside is not None and outside.boot > inside.boot:
        return Standing.RESTORED
    if found.st_ino != inside.inode or machine != inside.machine:
        return Standing.COPIED
    if outside is None:
        return Standing.RESTORED
    if (outside.boot, outside.inode, outside.changed) == (inside.boot, inside.inode, found.st_ctime_ns):
        return Standing.SAME
    if outside.next == _Next(inside.boot, inside.inode):
        # The last start ended between putting the inside record in place and saying so outside: it wrote no block.
        return Standing.SAME
    return Standing.RESTORED


def _count_boot(home: Home, folder: Path, identity: str, boot: int, machine: str, outside: _Outside | None) -> bool:
    """Write both records. Returns whether the outside one was kept.

    Order, for a home that was `same` (o = outside, i = inside):

        1  o: old, next = (boot, inode of the prepared file)    crash after: i is old and agrees with o
        2  i: the prepared file takes its place                 crash after: i agrees with o.next; no block was written
        3  o: boot, inode, changed                              crash after: i agrees with o

    At every point what is on disk is judged `same`, and rightly, because blocks are written only after 3. A copy made
    at any point fails on the inode, a restored one on boot or ctime. For a new id there is no old record and step 1
    is left out: a crash after 2 leaves a home whose outside record is missing, which gets yet another id. That is safe
    and costs nothing, since no feed was opened either.
    """
    try:
        replacement = Replacement(home.instance)
        inode = os.fstat(replacement.descriptor).st_ino
        replacement.write(msgspec.json.encode(_Inside(identity, boot, machine, inode)))
        if outside is not None:
            announced = _Outside(outside.boot, outside.inode, outside.changed, _Next(boot, inode))
            _write_outside(folder, identity, announced)
        replacement.commit()
    except OSError as error:
        raise file_error(error, f"write {home.instance}") from error
    changed = os.lstat(home.instance).st_ctime_ns
    return _write_outside(folder, identity, _Outside(boot, inode, changed))


def _write_outside(folder: Path, identity: str, record: _Outside) -> bool:
    """Keep the outside record, or at least none: one that is behind could vouch for a home it has not seen."""
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        replace(folder / identity, msgspec.json.encode(record))
    except OSError:
        with contextlib.suppress(OSError):
            (folder / identity).unlink()
        return False
    return True


def _read_inside(path: Path) -> _Inside | None:
    """The inside record; None when there is none that can be read, which is never taken for `same`."""
    try:
        record = msgspec.json.decode(read_bounded(path, RECORD_BYTES_MAX), type=_Inside)
    except (OSError, msgspec.MsgspecError, Corrupt):
        return None
    # The id becomes a file name outside.
    plain = len(record.id) == 32 and set(record.id) <= set("0123456789abcdef")
    return record if plain else None


def _read_outside(path: Path) -> _Outside | None:
    try:
        return msgspec.json.decode(read_bounded(path, RECORD_BYTES_MAX), type=_Outside)
    except (OSError, msgspec.MsgspecError, Corrupt):
        return None
