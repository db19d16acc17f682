"""The web service of thin clients: who it answers, what browsers are told of its pages, and links that open them."""

import http.client
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import InvalidStatus

import echostore
from chromium import Chromium
from cli_process import Cli
from echostore.demo import story
from echostore.kernel.errors import UsageError
from echostore.mesh.web_rules import BadOrigin, WebRules, parse_origin
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from edge_process import RunningEdge
from network_peers import until
from served import Serve
from test_thin_chromium import DONE, READY, TROUBLE, shown
from thin_client import ThinClient, dial

PAGES = ("/", "/planner.html", "/planner.js", "/planner.css", "/echostore-leaf.js", "/nothing")


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with echostore.open(tmp_path / "home", name="Root") as opened:
        yield opened


@pytest.fixture
def party(peer: Peer) -> Party:
    return peer.create_party("Thin")


def get(url: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        connection.putrequest("GET", path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", PAGES)
def test_every_page_has_a_strict_policy(peer: Peer, path: str) -> None:
    status, headers, data = get(peer.serve_thin("127.0.0.1:0"), path)
    assert status == (404 if path == "/nothing" else 200)
    policy = {part.split()[0]: part.split()[1:] for part in headers["content-security-policy"].split(";")}
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == ["'none'"]
    assert policy["script-src"] == policy["style-src"] == ["'self'"]
    assert "unsafe" not in headers["content-security-policy"]
    assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")
    if headers["content-type"].startswith("text/html"):
        assert b"<style" not in data
        assert b"<script>" not in data
        assert b" style=" not in data


@pytest.mark.parametrize(
    ("host", "origin", "why"),
    [
        ("127.0.0.1:4780", None, None),
        ("[::1]:4780", None, None),
        ("localhost:4780", "http://localhost:4780", None),
        ("127.0.0.1:4780", "http://127.0.0.1:4780", None),
        ("127.0.0.1:4780", "http://localhost:4780", "origin"),
        ("127.0.0.1:4780", "http://127.0.0.1:4781", "origin"),
        ("127.0.0.1:4780", "https://evil.example", "origin"),
        ("127.0.0.1:4780", "null", "origin"),
        ("127.0.0.1:4780", "http://127.0.0.1:4780.evil.example", "origin"),
        ("127.0.0.1:4780", "http://user@127.0.0.1:4780", "origin"),
        ("rebound.example:4780", "http://rebound.example:4780", "host"),
        ("rebound.example:4780", None, "host"),
        ("127.0.0.1.evil.example", None, "host"),
        ("evil.example@127.0.0.1:nonsense", None, "host"),
        ("", None, "host"),
        ("listens.example:4780", "http://listens.example:4780", None),
        ("app.example", "https://app.example", None),
        ("app.example", None, None),
        ("127.0.0.1:4780", "https://app.example", None),
        ("127.0.0.1:4780", "https://app.example:443", None),
        ("127.0.0.1:4780", "http://app.example", "origin"),
    ],
)
def test_who_is_answered(host: str, origin: str | None, why: str | None) -> None:
    rules = WebRules("listens.example", ["https://app.example/"])
    assert rules.why_not([host], [] if origin is None else [origin]) == why


def test_a_header_is_given_once() -> None:
    rules = WebRules("", [])
    assert rules.why_not([], []) == "host"
    assert rules.why_not(["127.0.0.1", "127.0.0.1"], []) == "host"
    assert rules.why_not(["127.0.0.1"], ["http://127.0.0.1"] * 2) == "origin"


@pytest.mark.parametrize("text", ["app.example", "ftp://app.example", "https://", "https://a/b", "https://a:99999"])
def test_what_is_no_origin(peer: Peer, text: str) -> None:
    with pytest.raises(BadOrigin):
        parse_origin(text)
    with pytest.raises(UsageError, match="not an origin"):
        peer.serve_thin("127.0.0.1:0", origins=[text])


def test_a_foreign_page_does_not_connect_and_is_counted(peer: Peer, party: Party) -> None:
    url = peer.serve_thin("127.0.0.1:0", origins=["https://app.example"])
    text, own = party.capability(edge=True, messages=True).text, url.replace("ws://", "http://").removesuffix("/thin")
    for origin in ("https://evil.example", "null"):
        with pytest.raises(InvalidStatus, match="403"):
            dial(url, origin=origin)
    assert get(url, "/", Host="rebound.example")[0] == 421
    assert "--thin-origin" in get(url, "/thin", Host="rebound.example", Upgrade="websocket")[2].decode()
    for origin in (own, "https://app.example"):
        with ThinClient(url, text, origin=origin) as client:
            assert client.ok["ok"] is True
    assert dict(peer.thin_services[0].numbers().refused) == {"origin": 2, "host": 2}
    with RunningEdge([url], text) as edge, pytest.raises(InvalidStatus, match="403"):
        dial(edge.url, origin="https://app.example")


# links


def test_serve_prints_a_link_that_shows_the_tasks_of_the_demo(tmp_path: Path) -> None:
    story.run(tmp_path / "demo", lambda *told: None)
    with echostore.open(tmp_path / "demo" / "laptop") as peer:
        (known,) = peer.parties()
        titles = sorted(each["title"] for each in peer.party(known.key).query(type="task"))
    assert "Pack the tent" in titles
    cli = Cli(tmp_path / "demo" / "laptop", tmp_path / "state")
    serve = Serve(cli, "--listen", "127.0.0.1:0", "--thin", "127.0.0.1:0")
    try:
        page = serve.told["page"]
        with Chromium(tmp_path) as browser:
            tab = browser.tab(page)
            until(lambda: tab.look(READY), seconds=60)
            until(lambda: sorted(shown(tab) + shown(tab, DONE)) == titles)
            tab.picture(tmp_path / "demo.png")
        issued = cli("party", "capability", "issue", "--json").ok().json()
        assert issued["link"] == page.partition("#")[0] + "#" + issued["text"]
        told = cli("party", "capability", "issue", "--read", "task")
        assert f"open in a browser: {page.partition('#')[0]}#{told.ok().out.strip()}" in told.err
        assert cli("party", "capability", "issue", "--edge", "--json").ok().json()["link"] is None
    finally:
        serve.stop()
    again = Serve(cli, "--listen", "127.0.0.1:0", "--thin", "127.0.0.1:0")
    try:  # the capability is used again, not issued again
        assert again.told["page"].partition("#")[2] == page.partition("#")[2]
    finally:
        again.stop()


def test_without_a_party_the_page_is_named_and_asks(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("init", "--name", "Root").ok()
    serve = Serve(cli, "--listen", "127.0.0.1:0", "--thin", "127.0.0.1:0")
    try:
        assert serve.told["page"] == serve.told["thin"].replace("ws://", "http://").replace("/thin", "/")
    finally:
        serve.stop()
    cli("party", "create", "Trip").ok()
    alone = cli("party", "capability", "issue").ok()
    assert "serve --thin" in alone.err


def test_a_capability_is_pasted_into_the_page(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Root") as peer, Chromium(tmp_path) as browser:
        party = peer.create_party("Trip")
        party.create("property-set", type="task", title="pasted", done=True)
        url = peer.serve_thin("127.0.0.1:0").replace("ws://", "http://").replace("/thin", "/")
        text = party.capability(write="*").text
        for pasted in (text, f"  {url}#{text} "):
            tab = browser.tab(url)
            until(lambda tab=tab: "needs a capability" in (tab.look(TROUBLE) or ""))
            tab.type("#capability", "nonsense")
            until(lambda tab=tab: "not a capability" in (tab.look(TROUBLE) or ""))
            tab.type("#capability", pasted)
            until(lambda tab=tab: tab.look(READY), seconds=60)
            until(lambda tab=tab: shown(tab, DONE) == ["pasted"])
            assert tab.run("document.getElementById('enter').hidden") is True
            assert tab.run("location.hash") == f"#{text}"
            tab.close()


def test_a_terminal_shows_a_code(tmp_path: Path) -> None:
    """A pipe gets the link alone."""
    program = (
        "from echostore.cli.output import Output; from echostore.cli.page_link import show_code; "
        "show_code(Output(), 'http://127.0.0.1:4780/#capability')"
    )
    upper, lower = pty.openpty()
    subprocess.run([sys.executable, "-c", program], stderr=lower, check=True, timeout=60)
    os.close(lower)
    drawn = b""
    while chunk := _read(upper):
        drawn += chunk
    os.close(upper)
    assert drawn.count("\u2584".encode()) + drawn.count("\u2588".encode()) > 50
    piped = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, check=True, timeout=60)
    assert piped.stderr == b""


def _read(file: int) -> bytes:
    try:
        return os.read(file, 65536)
    except OSError:  # the other end is closed, and all was read
        return b""
