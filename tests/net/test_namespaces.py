"""Real `echostore serve` processes on hosts of their own: network namespaces with a router between.

What can't run here fails and says why; nothing is skipped.
"""

from pathlib import Path

import pytest

from namespace_lines import PacketLines, ProxiedLines
from process_lab import Lab, chaos, cuts_and_drops, until


def test_packets_that_vanish_on_the_way(tmp_path: Path) -> None:
    with Lab(tmp_path, "abc", PacketLines("abc")) as lab:
        cuts_and_drops(lab)
        lab.judge()


@pytest.mark.parametrize(("names", "seed"), [("abc", 11), ("abcde", 12)])
def test_random_faults_of_the_network_and_killed_processes(tmp_path: Path, names: str, seed: int) -> None:
    with Lab(tmp_path, names, PacketLines(names)) as lab:
        lab.found()
        list(chaos(lab, seed, 40))
        lab.settle()
        lab.judge()


def test_proxies_that_delay_drop_and_cut(tmp_path: Path) -> None:
    lines = ProxiedLines("abcd")
    with Lab(tmp_path, "abcd", lines) as lab:
        lab.found()
        lines.shape("a", "b", delay_s=0.05)
        lines.shape("c", "d", bytes_per_s=20_000)
        list(chaos(lab, 13, 40))
        lab.settle()
        lab.judge()


def test_a_cable_that_is_pulled_and_put_back(tmp_path: Path) -> None:
    lines = PacketLines("abc")
    with Lab(tmp_path, "abc", lines, links="ab,bc") as lab:
        lab.found()
        lab.write("a")
        lab.settle()
        lines.unplug("b")
        for name in "abc":
            lab.write(name, size=3)
        assert not lab.has("c", "b", 1)
        lab.kill("b")
        lab.start("b")
        lab.write("b")
        lab.heal()
        until(lambda: lab.has("c", "a", 3), "it came over the middle")
        lab.settle()
        lab.judge()
