"""Sums of one tensor over workers, each of which hands parts on to the next one: reduce-scatter, then all-gather
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).

The connections are those of parameter servers rather than a process group: workers come and go, and a killed one is
noticed at once by who receives from it, who ends its own connections, and so on around the ring.
"""

from __future__ import annotations

import threading

from torch import Tensor

from runner.server.links import BROKEN, ServerLink


class Ring:
    """The place of one worker among `size`.

    Args:
        position: of the worker.
        ahead: leads to the next one.
        behind: leads to the one before.
    """

    def __init__(self, position: int, size: int, ahead: ServerLink, behind: ServerLink) -> None:
        self._position, self._size, self._ahead, self._behind = position, size, ahead, behind

    def add(self, values: Tensor) -> int:
        """Replace `values` [elements] by the sum of those of all workers, the same bits on each of them.

        Returns:
            The bytes sent.

        Raises:
            OSError, EOFError: a worker is down, or hangs.
        """
        parts, before = values.tensor_split(self._size), self._ahead.sent
        for turn in range(2 * (self._size - 1)):
            given = parts[(self._position - turn) % self._size]
            taken = parts[(self._position - turn - 1) % self._size]
            failed: list[BaseException] = []
            sender = threading.Thread(target=self._send, args=(given, failed))  # duplex, as buffers are small
            sender.start()
            try:
                if turn < self._size - 1:
                    taken += self._behind.receive()[1][0]
                else:
                    self._behind.receive([taken])
            except BROKEN:
                self.close()
                raise
            finally:
                sender.join()
            if failed:
                self.close()
                raise failed[0]
        return self._ahead.sent - before

    def _send(self, part: Tensor, failed: list[BaseException]) -> None:
        try:
            self._ahead.send("part", [part])
        except BROKEN as error:
            failed.append(error)
            self._behind.close()  # whoever waits for it in `add` goes on

    def close(self) -> None:
        """End both connections, so that the neighbours notice."""
        self._ahead.close()
        self._behind.close()
