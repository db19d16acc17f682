"""`echostore identity`: who this peer is."""

from cyclopts import App

from echostore.cli.opening import reading
from echostore.cli.options import OPTIONS, Options, examples
from echostore.cli.output import Output

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
