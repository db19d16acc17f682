"""The planner page in a real Chromium, served by a real peer: two tabs write, go offline, come back, and agree."""

import json
from pathlib import Path
from typing import Any

import echostore
from chromium import Chromium, Tab
from network_peers import until

TITLES = "JSON.stringify([...document.querySelectorAll('#open li input[type=text]')].map((each) => each.value))"
DONE = TITLES.replace("#open", "#done")
TROUBLE = "document.getElementById('trouble').textContent"
READY = "Boolean(window.planner?.connected)"


def shown(tab: Tab, script: str = TITLES) -> Any:
    return json.loads(tab.look(script) or "null")


def test_two_tabs_and_a_peer_agree_also_after_a_time_offline(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Root") as peer, Chromium(tmp_path) as browser:
        party = peer.create_party("Trip")
        first = party.create("property-set", type="task", title="at the peer", done=False)
        url = peer.serve_thin("127.0.0.1:0")
        capability = party.capability(read="*", write=["task"], messages=True)
        page = url.replace("ws://", "http://").replace("/thin", "/#") + capability.text
        one, two = browser.tab(page), browser.tab(page)
        for tab in (one, two):
            until(lambda tab=tab: tab.look(READY), seconds=60)
            until(lambda tab=tab: shown(tab) == ["at the peer"])

        one.type("#title", "from a tab")  # create
        until(lambda: shown(two) == ["at the peer", "from a tab"])
        until(lambda: [each["title"] for each in party.query(type="task").order_by("title")] == shown(two))
        two.click("#open li input[type=checkbox]")  # edit
        until(lambda: first["done"] is True)
        until(lambda: shown(one, DONE) == ["at the peer"])
        first["title"] = "changed at the peer"  # watch
        until(lambda: shown(one, DONE) == shown(two, DONE) == ["changed at the peer"])

        one.click("#switch")  # offline
        until(lambda: one.run("planner.connected") is False)
        one.type("#title", "written offline")
        one.run("document.querySelector('#open li input[type=text]').value = 'edited offline'")
        one.run("document.querySelector('#open li input[type=text]').dispatchEvent(new Event('change'))")
        until(lambda: shown(one) == ["edited offline", "written offline"])
        party.create("property-set", type="task", title="meanwhile", done=False)
        until(lambda: "meanwhile" in shown(two))
        assert "meanwhile" not in shown(one)
        assert one.run("planner.pending") == 2
        one.picture(tmp_path / "offline.png")

        one.reload()  # what was written offline is in the browser's own storage
        both = ["edited offline", "meanwhile", "written offline"]
        until(lambda: one.look(READY), seconds=60)
        until(lambda: shown(one) == shown(two) == both)
        until(lambda: one.run("planner.pending") == 0)
        titles = [each["title"] for each in party.query(type="task", done=False).order_by("title")]
        assert titles == both
        two.click("#open li button")
        until(lambda: shown(one) == shown(two) == both[1:])
        assert one.run("planner.system") != two.run("planner.system")
        one.picture(tmp_path / "online.png")

        party.capabilities.revoke(capability.id)
        until(lambda: one.run("planner.refused?.code") == "E-CAPABILITY")


def test_a_page_without_a_capability_says_what_it_needs(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Root") as peer, Chromium(tmp_path) as browser:
        peer.create_party("Trip")
        url = peer.serve_thin("127.0.0.1:0").replace("ws://", "http://").replace("/thin", "/")
        for fragment, words in (("", "needs a capability"), ("#nonsense", "not a capability")):
            tab = browser.tab(url + fragment)
            until(lambda tab=tab, words=words: words in (tab.look(TROUBLE) or ""))
            tab.close()
