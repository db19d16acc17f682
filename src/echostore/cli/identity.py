"""`echostore identity`: who this peer is."""

from typing import Any

from cyclopts import App

from echostore.cli.opening import looking, reading, writing
from echostore.cli.options import OPTIONS, Options, examples
from echostore.cli.output import Output
from echostore.cli.values import one_line, short

app = App(
    name="identity",
    help="Who this peer is.",
    help_prologue=examples("echostore identity show", "echostore identity show --json"),
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
