"""The fault proxy does what its words say. Only least times are asserted: a busy machine is slower, never faster."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from echostore.testing.fault_proxy import HELD_BYTES_MAX, FaultProxy, Way
from network_peers import PATIENCE_S, until


class Echo:
    """Gives back what it gets, and keeps it."""

    def __init__(self) -> None:
        self.got = bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    self.got += data
                    connection.sendall(data)
            except OSError:
                return  # cut

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


@contextmanager
def dialled(line: FaultProxy) -> Iterator[socket.socket]:
    host, _, port = line.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        yield connection


def exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def test_bytes_pass_in_order_both_ways_and_so_does_the_end(echo: Echo) -> None:
    text = bytes(range(256)) * 4096
    with FaultProxy(echo.address) as line, dialled(line) as connection:
        threading.Thread(target=connection.sendall, args=(text,), daemon=True).start()
        assert exactly(connection, len(text)) == text
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
        until(lambda: line.connections == 0)


@pytest.mark.parametrize(("ways", "arrives"), [((), False), ((Way.TO_TARGET,), False), ((Way.TO_DIALLER,), True)])
def test_a_drop_holds_back_and_a_heal_lets_pass(echo: Echo, ways: tuple[Way, ...], arrives: bool) -> None:
    with FaultProxy(echo.address) as line, dialled(line) as connection:
        connection.sendall(b"a")
        assert exactly(connection, 1) == b"a"
        line.drop(*ways)
        connection.sendall(b"b")
        if arrives:
            until(lambda: echo.got == b"ab")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert (echo.got == b"ab") is arrives
        connection.settimeout(PATIENCE_S)
        line.heal()
        assert exactly(connection, 1) == b"b"


def test_what_is_held_back_is_bounded(echo: Echo) -> None:
    with FaultProxy(echo.address) as line, dialled(line) as connection:
        line.drop()
        connection.setblocking(False)
        sent, quiet = 0, 0
        while quiet < 50:
            try:
                sent += connection.send(bytes(1 << 20))
                quiet = 0
            except BlockingIOError:
                quiet += 1
                time.sleep(0.01)
        assert sent < HELD_BYTES_MAX + 32 * 1024 * 1024, "the rest are buffers of the kernel"


def test_a_cut_resets_what_stands_and_what_comes(echo: Echo) -> None:
    with FaultProxy(echo.address) as line, dialled(line) as connection:
        connection.sendall(b"a")
        assert exactly(connection, 1) == b"a"
        line.cut()
        assert ended(connection)
        with dialled(line) as another:
            assert ended(another)
        line.heal()
        with dialled(line) as again:
            again.sendall(b"c")
            assert exactly(again, 1) == b"c"
            line.reset()
            assert ended(again)
        assert echo.got == b"ac"


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_delay_and_bandwidth_take_their_time(echo: Echo) -> None:
    with FaultProxy(echo.address) as line, dialled(line) as connection:
        line.shape(delay_s=0.1)
        begun = time.monotonic()
        connection.sendall(b"a")
        assert exactly(connection, 1) == b"a"
        assert time.monotonic() - begun >= 0.2
        line.shape(bytes_per_s=10_000)
        begun = time.monotonic()
        connection.sendall(bytes(2_000))
        assert len(exactly(connection, 2_000)) == 2_000
        assert time.monotonic() - begun >= 0.15


def test_it_leads_elsewhere_when_told(echo: Echo) -> None:
    other = Echo()
    with FaultProxy("127.0.0.1:9") as line:
        with dialled(line) as nowhere:
            assert ended(nowhere)
        for target in (echo, other):
            line.retarget(target.address)
            with dialled(line) as connection:
                connection.sendall(b"x")
                assert exactly(connection, 1) == b"x"
    other.close()
    assert (echo.got, other.got) == (b"x", b"x")


def test_as_a_process(echo: Echo) -> None:
    command = [sys.executable, "-m", "echostore.testing.fault_proxy"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for method, positional in (("open", ["127.0.0.1:0"]), ("retarget", [echo.address])):
            process.stdin.write(json.dumps([method, "ab", positional, {}]) + "\n")
            process.stdin.flush()
            host, _, port = json.loads(process.stdout.readline()).rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            connection.sendall(b"x")
            assert exactly(connection, 1) == b"x"
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
