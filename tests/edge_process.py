"""Edges for tests: in a thread of this process, over real sockets."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from echostore.mesh.coherence_edge import EdgeNode
from echostore.wire.capabilities import capability_from_text
from network_peers import until


class RunningEdge:
    """An edge that is ready for clients."""

    def __init__(self, ups: list[str], capability: str, *, port: int = 0, wait: bool = True) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._dead = False

        async def start() -> tuple[EdgeNode, str]:
            node = EdgeNode(ups, capability_from_text(capability), now_ms=lambda: time.time_ns() // 1_000_000)
            return node, await node.start("127.0.0.1", port)

        self.node, self.url = self._await(start())
        if wait:
            until(lambda: self.ask(lambda node: node.ready))

    def _await(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def ask(self, question: Callable[[EdgeNode], Any]) -> Any:
        """Look at the edge in its own thread."""

        async def answer() -> Any:
            return question(self.node)

        return self._await(answer())

    def kill(self) -> None:
        """As SIGKILL does: all its sockets are reset, and nobody hears a word of it."""

        async def abort() -> None:
            for task in self.node._tasks:  # no way up is looked for any more
                task.cancel()
            for link in self.node.server.links.values():
                link.connection.transport.abort()
            if self.node._up is not None:
                self.node._up._socket.transport.abort()

        self._await(abort())
        self.close()

    def close(self) -> None:
        if not self._dead:
            self._dead = True
            self._await(self.node.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(30)
            self._loop.close()

    def __enter__(self) -> "RunningEdge":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
