"""`echostore identity`: who this peer is."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from echostore.cli.device_join import tell_entered
from echostore.cli.moments import parse_duration_s
from echostore.cli.opening import ask_passphrase, home_path, looking, read_input, reading, writing
from echostore.cli.options import FLAG, OPTIONS, YES, Options, examples
from echostore.cli.output import Output, if_interrupted
from echostore.cli.values import one_line, short
from echostore.kernel.errors import Refused, Unreachable

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

app = App(
    name="identity",
    help="Who this peer is.",
    help_prologue=examples("echostore identity show", "echostore identity phrase"),
)


@app.command(help_prologue=examples("echostore identity show", "echostore identity show --json | jq -r .identity"))
def show(*, options: Options = OPTIONS) -> None:
    """Show this peer's name and public keys. Secrets are never shown."""
    output = Output.of(options)
    with reading(options) as peer:
        fields = {
            "name": peer.name,
            "identity": peer.identity.hex(),
            "device": peer.device.hex(),
            "protected": peer.keys.protected,
            "parties": len(peer.parties()),
        }
    # The full keys: they are what another member is told.
    output.document(
        fields,
        [
            f"name       {fields['name'] or '(none)'}",
            f"identity   {fields['identity']}",
            f"device     {fields['device']}",
            f"key file   {'sealed with a passphrase' if fields['protected'] else 'not sealed'}",
            f"parties    {fields['parties']}",
        ],
    )


@app.command(help_prologue=examples("echostore identity profile --name Zoe", "echostore identity profile --json"))
def profile(*, name: str | None = None, options: Options = OPTIONS) -> None:
    """Show under which name others know this identity; with --name, change it in every party.

    Parameters
    ----------
    name
        The new name, as members will see it.
    """
    output = Output.of(options)
    with looking(options) if name is None else writing(options) as peer:
        if name is not None:
            peer.rename(name)
        parties: list[dict[str, Any]] = []
        for known in peer.parties():
            if known.state == "closed" or known.local or known.child_of is not None:
                continue
            party = peer.party(known.key)
            if name is not None:
                party.members.set_profile(name)
                party.flush()
            shown = [member.name for member in party.members.all() if member.identity == peer.identity]
            parties.append({"party": known.key.hex(), "title": party.title, "name": shown[0] if shown else None})
        fields = {"name": peer.name, "identity": peer.identity.hex(), "parties": parties}
    lines = [f"name       {fields['name'] or '(none)'}"]
    lines += [
        f"{short(each['party'])}   {one_line(each['name'] or '(none)')} in {one_line(each['title'])}"
        for each in parties
    ]
    output.document(fields, lines)


@app.command(help_prologue=examples("echostore identity phrase", "echostore identity phrase --remove-key"))
def phrase(
    *,
    remove_key: Annotated[bool, FLAG] = False,
    yes: Annotated[bool, YES] = False,
    options: Options = OPTIONS,
) -> None:
    """Show the recovery phrase: 24 words that bring this identity back on an empty machine. Write them on paper.

    Whoever has the words is this identity. They are kept in no file. Only a device that has the identity's own key can
    show them: the one where it was made, or recovered.

    Parameters
    ----------
    remove_key
        Then take the identity's key off this device: it stays a device like any other, and if it is stolen it can be
        revoked for good. From then on only the paper has the key.
    yes
        Remove the key without asking; needed where nobody can be asked.
    """
    output = Output.of(options)
    with writing(options) as peer:
        words = peer.recovery_phrase().split()
        output.note("whoever has these words is this identity; write them on paper, in this order")
        rows = [words[at : at + 6] for at in range(0, len(words), 6)]
        output.document({"identity": peer.identity.hex(), "words": words}, [" ".join(row) for row in rows])
        if remove_key and output.confirm("Are the words on paper, and is the key to leave this device?", yes=yes):
            peer.forget_identity_key()
            output.note("the identity's key is no longer on this device")


def _recover(
    output: Output, peer: "Peer", words: str, sources: tuple[str, ...], patience_s: float, *, lan: bool
) -> "list[Party]":
    if sources or not lan:
        return peer.recover(words, *sources, timeout=patience_s)
    output.note("looking for members on the local network")
    from echostore.peer.recovery import key_of

    try:
        return peer.recover(words, timeout=patience_s, lan=True)
    except (Refused, Unreachable) as error:
        if peer.identity != key_of(words).public:
            raise
        output.warn(f"{error.what}; the identity is back, its parties are not: run it again with --from")
        return []


@app.command(
    help_prologue=examples(
        "echostore identity recover --from 192.0.2.7:4711", "echostore --home ./data identity recover --name Laptop"
    )
)
def recover(
    *,
    from_: Annotated[tuple[str, ...], Parameter(name="--from", consume_multiple=False)] = (),
    lan: Annotated[bool, Parameter(negative="--no-lan")] = True,
    timeout: str = "60s",
    name: str | None = None,
    options: Options = OPTIONS,
) -> None:
    """Bring an identity back with its recovery phrase, and fetch its parties from any member that can be reached.

    The words are asked for on a terminal, or read from standard input; they are never an argument, where others could see
    them. The home must be empty, or its own identity in no party; it is made if there is none. Again with another --from:
    parties that are missing come too.

    Parameters
    ----------
    from_
        host:port of a member, or any ticket that one has made; may be given several times.
    lan
        Without --from, look for other devices and members on the local network, where `echostore serve --lan` runs. Who
        does not know the identity does not learn who is looking. With --no-lan only the identity comes back.
    timeout
        How long to wait for a member, and later for the next block: 60s, 5m.
    name
        What this device is called, if the home is new.
    """
    from echostore.peer.recovery import key_of

    output = Output.of(options)
    patience_s = parse_duration_s(timeout)
    words = ask_passphrase("Recovery phrase: ") if sys.stdin.isatty() else read_input()
    key_of(words)  # what is wrong with it is told before anything is made
    fresh = not (home_path(options) / "keys").exists()
    with writing(options, create=True, name=name) as peer:
        if fresh:
            output.note(f"made a home at {home_path(options)}")
        with if_interrupted("The identity may be back already; run it again to go on."):
            entered = _recover(output, peer, words, from_, patience_s, lan=lan)
        tell_entered(output, peer, entered, patience_s)
