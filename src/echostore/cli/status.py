"""`echostore status`: what is where, for every party."""

from typing import Any

from cyclopts import App

from echostore.cli.opening import reading
from echostore.cli.options import OPTIONS, Options, examples
from echostore.cli.output import Output
from echostore.cli.values import one_line, short
from echostore.kernel.errors import EchoError

app = App(name="status", help_prologue=examples("echostore status", "echostore --home ./data status --json"))


@app.default
def status(*, options: Options = OPTIONS) -> None:
    """Tell what is where: per party, blocks held, processed and known, and what is on no other peer.

    Closed parties are not opened. What other peers hold is told as far as they said so to this process.
    """
    from echostore.cli.party import party_fields

    output = Output.of(options)
    with reading(options) as peer:
        parties: list[dict[str, Any]] = []
        for known in peer.parties():
            head = {"party": known.key.hex(), "title": known.title, "state": str(known.state)}
            try:
                parties.append({**head, **(party_fields(peer.party(known.key)) if known.state != "closed" else {})})
            except EchoError as error:
                # One broken party must not hide the others.
                parties.append({**head, "error": {"code": error.code, "what": error.what}})
                output.warn(f"party {short(known.key.hex())}: {error.what}")
        fields = {"home": str(peer.home.path), "name": peer.name, "parties": parties}
    output.document(fields, [_line(party) for party in parties] or ["no party here"])


def _line(party: dict[str, Any]) -> str:
    told = party.get("truth") or (f"unreadable: {party['error']['what']}" if "error" in party else "not opened")
    state = "" if party["state"] == "active" else f" ({party['state']})"
    return f"{short(party['party'])}  {one_line(party['title'], 40)}{state}: {told}"
