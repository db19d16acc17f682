"""Hosts in network namespaces of their own, joined by a router in a third kind: real interfaces, real packets.

     ns a  10.77.1.2 ── veth ── 10.77.1.1 ┐
     ns b  10.77.2.2 ── veth ── 10.77.2.1 ┤ ns router: forwards, drops by rule, and has the fault proxies
     ns c  10.77.3.2 ── veth ── 10.77.3.1 ┘

`PacketLines` breaks the network with routing rules: `drop` lets packets of one direction vanish, `cut` answers them with
"unreachable", `unplug` takes an interface down. `ProxiedLines` has a proxy in the router between each two hosts. No
privilege is needed where the kernel lets users make namespaces; else root is. Every namespace ends with a process that
ends with this one, so nothing is left behind.
"""

import json
import shutil
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0
NEEDED = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


class CanNotRun(AssertionError):
    """What is missing on this machine. A failure: these tests are not skipped."""


class PacketLines:
    """See the module."""

    def __init__(self, names: str) -> None:
        self._names = sorted(names)
        self._rules: list[str] = []
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        missing = [f"`{each}` (package {package})" for each, package in NEEDED.items() if shutil.which(each) is None]
        if missing:
            raise CanNotRun(f"test-net needs {' and '.join(missing)}; install it and try again")
        try:
            self._user = self._user_namespaces()
            self._build()
        except BaseException:
            self.close()
            raise

    def _user_namespaces(self) -> bool:
        """Whether namespaces are made without root."""
        tried = []
        for user in (True, False):
            done = subprocess.run([*_unshare(user), "true"], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return user
            tried.append(done.stderr.strip())
        raise CanNotRun(
            "test-net may not make network namespaces: run it as root, or allow users to make them "
            f"(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces). The kernel said: {'; '.join(tried)}"
        )

    def _build(self) -> None:
        self._hold("router", _unshare(self._user))
        setup = ["link set lo up"]
        for number, name in enumerate(self._names, 1):
            self._hold(name, [*self.inside("router"), "unshare", "--net"])
            pid = self._holders[name].pid
            setup += [
                f"link add v{name} type veth peer name eth0 netns {pid}",
                f"addr add 10.77.{number}.1/24 dev v{name}",
                f"link set v{name} up",
            ]
        self._ip("router", *setup)
        forward = [*self.inside("router"), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
        _run(forward)
        for number, name in enumerate(self._names, 1):
            self._ip(
                name,
                "link set lo up",
                f"addr add {self.host(name)}/24 dev eth0",
                "link set eth0 up",
                f"route add default via 10.77.{number}.1",
            )

    def _hold(self, name: str, command: list[str]) -> None:
        """A process that does nothing but keep a namespace, until its input ends."""
        holder = self._holders[name] = subprocess.Popen(
            [*command, "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "cat":
            assert holder.poll() is None, f"the namespace of {name} could not be made"
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def inside(self, name: str) -> list[str]:
        user = ["--user", "--preserve-credentials"] if self._user else []
        return ["nsenter", "--target", str(self._holders[name].pid), *user, "--net", "--"]

    def host(self, name: str) -> str:
        return f"10.77.{self._names.index(name) + 1}.2"

    def _ip(self, name: str, *lines: str) -> None:
        _run([*self.inside(name), "ip", "-batch", "-"], "\n".join(lines) + "\n")

    # for the lab

    def listen(self, name: str) -> str:
        return f"{self.host(name)}:4711"

    def wrap(self, name: str, command: list[str]) -> list[str]:
        return [*self.inside(name), *command]

    def came_up(self, name: str, address: str) -> None:
        assert address == self.listen(name)

    def address(self, of: str, seen_by: str) -> str:
        return self.listen(of)

    def drop(self, sender: str, receiver: str) -> None:
        """Packets from one to the other vanish."""
        self._rule(sender, receiver, "blackhole")

    def cut(self, one: str, other: str) -> None:
        """Each is told that the other can't be reached."""
        self._rule(one, other, "unreachable")
        self._rule(other, one, "unreachable")

    def unplug(self, name: str) -> None:
        self._ip("router", f"link set v{name} down")

    def heal(self) -> None:
        rules, self._rules = self._rules, []
        plugs = [f"link set v{name} up" for name in self._names]
        self._ip("router", *(f"rule del {rule}" for rule in rules), *plugs)

    def close(self) -> None:
        for holder in reversed(self._holders.values()):
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait(PATIENCE_S)
        self._holders.clear()

    def _rule(self, sender: str, receiver: str, action: str) -> None:
        rule = f"from {self.host(sender)} to {self.host(receiver)} {action}"
        if rule not in self._rules:
            self._rules.append(rule)
            self._ip("router", f"rule add {rule}")


class ProxiedLines(PacketLines):
    """Hosts reach each other over proxies in the router alone."""

    def __init__(self, names: str) -> None:
        super().__init__(names)
        command = [sys.executable, "-m", "echostore.testing.fault_proxy"]
        self._proxies = subprocess.Popen(
            [*self.inside("router"), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._addresses = {
            (low, high): self._tell("open", low, high, f"10.77.{self._names.index(high) + 1}.1:0")
            for low, high in combinations(self._names, 2)
        }

    def came_up(self, name: str, address: str) -> None:
        super().came_up(name, address)
        for low, high in self._addresses:
            if low == name:
                self._tell("retarget", low, high, address)

    def address(self, of: str, seen_by: str) -> str:
        return self._addresses[min(of, seen_by), max(of, seen_by)]

    def drop(self, sender: str, receiver: str) -> None:
        self._tell("drop", *sorted((sender, receiver)), "to-target" if sender > receiver else "to-dialler")

    def cut(self, one: str, other: str) -> None:
        self._tell("cut", *sorted((one, other)))

    def shape(self, one: str, other: str, **how: float) -> None:
        self._tell("shape", *sorted((one, other)), **how)

    def heal(self) -> None:
        super().heal()
        for low, high in self._addresses:
            self._tell("heal", low, high)

    def close(self) -> None:
        if hasattr(self, "_proxies"):
            assert self._proxies.stdin is not None
            assert self._proxies.stdout is not None
            self._proxies.stdin.close()
            self._proxies.wait(PATIENCE_S)
            self._proxies.stdout.close()
        super().close()

    def _tell(self, method: str, low: str, high: str, *positional: Any, **named: Any) -> Any:
        assert self._proxies.stdin is not None
        assert self._proxies.stdout is not None
        self._proxies.stdin.write(json.dumps([method, low + high, positional, named]) + "\n")
        self._proxies.stdin.flush()
        return json.loads(self._proxies.stdout.readline())


def _unshare(user: bool) -> list[str]:
    return ["unshare", *(("--user", "--map-root-user") if user else ()), "--net"]


def _run(command: list[str], stdin: str = "") -> None:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CanNotRun(f"test-net: `{' '.join(command)}` failed on {stdin!r}: {done.stderr.strip()}")
