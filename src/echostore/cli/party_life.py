"""What ends, stops or moves a party: the verbs pause, resume, close, forget, export and import of `echostore party`."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from echostore.cli.opening import home_path, looking, open_party, party_key, reading, writing
from echostore.cli.options import FLAG, IN_PARTY, OPTIONS, YES, InParty, Options, named_party, party_and
from echostore.cli.output import Output, counted, if_interrupted, size
from echostore.cli.values import one_line, short
from echostore.kernel.errors import EchoError, NotFound, Refused, UsageError

if TYPE_CHECKING:
    from echostore.peer.peer import Peer

EXAMPLES = {
    "pause": ("echostore party pause @Trip", "echostore party pause 1f3a9c02 --json"),
    "resume": ("echostore party resume @Trip", "echostore party resume 1f3a9c02 --json"),
    "close": ("echostore party close @Trip", "echostore party close 1f3a9c02 --json"),
    "forget": ("echostore party forget @Trip --dry-run", "echostore party forget 1f3a9c02 --yes"),
    "export": ("echostore party export @Trip trip.car", "echostore party export 1f3a9c02 backup/trip.car --json"),
    "import": ("echostore party import trip.car", "echostore --home other party import trip.car --json"),
}


def pause(party: str | None = None, /, *, options: InParty = IN_PARTY) -> None:
    """Hold new blocks of a party without processing them, also after a restart.

    Parameters
    ----------
    party
        Key, unique prefix or @title; --party says the same. Without it, the default party.
    """
    _change_state(party, options, "paused")


def resume(party: str | None = None, /, *, options: InParty = IN_PARTY) -> None:
    """Process a paused or closed party again.

    Parameters
    ----------
    party
        Key, unique prefix or @title; --party says the same. Without it, the default party.
    """
    _change_state(party, options, "active")


def close(party: str | None = None, /, *, options: InParty = IN_PARTY) -> None:
    """Close a party until it is resumed: nothing of it is opened or decoded.

    Parameters
    ----------
    party
        Key, unique prefix or @title; --party says the same. Without it, the default party.
    """
    _change_state(party, options, "closed")


def _change_state(given: str | None, options: InParty, state: str) -> None:
    output = Output.of(options)
    with writing(options) as peer:
        key = party_key(peer, named_party(options, given))
        verb = {"paused": peer.pause_party, "active": peer.resume_party, "closed": peer.close_party}[state]
        if state == "paused" and str(peer.meta.party(key).state) == "closed":
            raise Refused("the party is closed", next_step="Resume it first.")
        verb(key)
    output.document({"party": key.hex(), "state": state}, f"{short(key.hex())} {state}")


def forget(
    party: str | None = None,
    /,
    *,
    dry_run: Annotated[bool, FLAG] = False,
    yes: Annotated[bool, YES] = False,
    options: InParty = IN_PARTY,
) -> None:
    """Delete everything this peer holds of a party, for good. Other members keep theirs.

    Parameters
    ----------
    party
        Key, unique prefix or @title; --party says the same. The default party is not taken: name it.
    dry_run
        Only tell what would be lost.
    yes
        Do it without asking; needed where nobody can be asked.
    """
    output = Output.of(options)
    which = named_party(options, party)
    if which is None:
        raise UsageError("the party to forget is not named", next_step="Give its key or @title.")
    with looking(options) as peer:
        losses = _losses(peer, which)
    for line in _loss_lines(losses):
        output.note(line)
    if dry_run:
        output.document({**losses, "forgotten": False}, f"would forget {short(losses['party'])}")
        return
    if not output.confirm(f"Forget {short(losses['party'])} {one_line(losses['title'])!r}?", yes=yes):
        output.document({**losses, "forgotten": False}, "nothing forgotten")
        return
    with writing(options) as peer:
        peer.forget_party(party_key(peer, losses["party"]))
    output.document({**losses, "forgotten": True}, f"forgot {short(losses['party'])}")


def _losses(peer: "Peer", which: str) -> dict[str, Any]:
    """What forgetting a party would take away. A party that can't be opened can be forgotten all the same."""
    key = party_key(peer, which)
    known = peer.meta.party(key)
    losses: dict[str, Any] = {
        "party": key.hex(),
        "title": known.title,
        "bytes": disk_bytes(peer.home.party(key).path),
        "blocks": None,
        "items": None,
        "unshared": None,
        "unreadable": None,
    }
    try:
        status = peer.party(key).status
    except EchoError as error:
        losses["unreadable"] = error.what
    else:
        losses["blocks"] = sum(feed.held for feed in status.feeds)
        losses["items"] = status.items
        losses["unshared"] = status.unshared
    return losses


def _loss_lines(losses: dict[str, Any]) -> list[str]:
    lines = [f"this deletes {short(losses['party'])} {one_line(losses['title'])!r} from this machine:"]
    if losses["unreadable"]:
        lines.append(f"  what it holds can't be told: {one_line(losses['unreadable'])}")
    else:
        lines.append(f"  {counted(losses['blocks'], 'block')}, {counted(losses['items'], 'item')}")
        if losses["unshared"]:
            lines.append(
                f"  {counted(losses['unshared'], 'own block')} not known to be on any other peer: lost for good"
            )
    lines.append(f"  {size(losses['bytes'])} on disk")
    return lines


def export(party_or_file: str, file: str | None = None, /, *, options: InParty = IN_PARTY) -> None:
    """Write a party's feeds and blobs into a CAR file.

    Parameters
    ----------
    party_or_file
        The party, by key, unique prefix or @title; or the file, when --party or the default names the party.
    file
        The file to write; it must not be there yet, and appears when it is complete.
    """
    output = Output.of(options)
    from echostore.peer.transfer import export_party

    party, name = party_and(options, party_or_file, file)
    target = Path(name or "")

    with (
        reading(options) as peer,
        if_interrupted(f"{target} was not written."),
        output.progress(f"export {target.name}") as tell,
    ):
        opened = open_party(peer, party)
        done = export_party(opened, target, tell)
    fields = {
        "party": opened.key.hex(),
        "file": str(done.path),
        "bytes": done.bytes,
        "feeds": done.feeds,
        "blocks": done.blocks,
        "blobs": done.blobs,
        "snapshot": done.cid,
        "epoch": done.epoch,
    }
    if done.epoch is not None:
        output.note(f"the history below is not here: the file begins at epoch {done.epoch}")
    output.note(f"{counted(done.blocks, 'block')} of {counted(done.feeds, 'feed')}, {size(done.bytes)}")
    output.document(fields, str(done.path))


def import_(file: Path, /, *, options: Options = OPTIONS) -> None:
    """Read a party from a CAR file that `party export` wrote. Everything in it is checked first.

    Parameters
    ----------
    file
        The file to read.
    """
    output = Output.of(options)
    if not file.is_file():
        raise NotFound(f"there is no file {file}")
    fresh = not (home_path(options) / "keys").exists()
    with (
        removed_on_failure(home_path(options)) if fresh else nullcontext(),
        writing(options, create=True) as peer,
        if_interrupted("A new party was not taken in; one that was here keeps what came so far, checked."),
        output.progress(f"import {file.name}") as tell,
    ):
        party = peer.import_party(file, tell)
        status = party.status
        fields: dict[str, Any] = {
            "party": party.key.hex(),
            "title": party.title,
            "blocks": sum(feed.held for feed in status.feeds),
            "items": status.items,
        }
    if fresh:
        output.note(f"made a home at {home_path(options)}")
    output.note(f"{counted(fields['blocks'], 'block')}, {counted(fields['items'], 'item')}")
    output.document(fields, short(fields["party"]))


@contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """A home that is made inside of this for nothing is taken away again, as far as it was not there before."""
    from echostore.store.home import LOCK, Home
    from echostore.store.instance import forget_instance
    from echostore.store.lock import HomeLock

    missing = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    before = os.listdir(path) if path.is_dir() else []
    try:
        yield
    except BaseException:
        if path.is_dir() and not before:
            with suppress(EchoError), HomeLock(path / LOCK):  # someone else may have begun to use it by now
                forget_instance(Home(path))
                for name in os.listdir(path):
                    _remove(path / name)
            for folder in missing:
                with suppress(OSError):  # not empty: someone else's by now
                    folder.rmdir()
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def disk_bytes(folder: Path) -> int:
    """What a folder takes on disk, files directly in it."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.is_file())
    except OSError:
        return 0
