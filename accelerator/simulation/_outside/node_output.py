"""Copies the output of the nodes of a simulated cluster, with the node before each line."""

from __future__ import annotations

import os
import re
import select
import threading
from types import TracebackType

# An unfinished line, such as a prompt or a progress bar, is shown after this time.
_PATIENCE_S = 0.2
_CHUNK = 1 << 16
_JOIN_S = 10.0
# A progress bar returns to the start of its line.
_START_OF_LINE = re.compile(rb"(\n|\r(?!\n))(?=.)", re.DOTALL)


class NodeOutput:
    """The output of all nodes. Its end waits until all of it has been copied."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        # The node and the descriptor of a line without an end, after which another line must begin with an end of line.
        self._unfinished: tuple[int, int] | None = None

    def open(self, node: int, target: int) -> int:
        """Return a new descriptor; what is written to it is copied to another one.

        Args:
            node: The number of the node.
            target: The descriptor that gets the output.
        """
        reading, writing = os.pipe()
        thread = threading.Thread(target=self._copy, args=(node, reading, target), daemon=True)
        thread.start()
        self._threads.append(thread)
        return writing

    def __enter__(self) -> NodeOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for thread in self._threads:
            thread.join(_JOIN_S)  # a process that could not be ended still has the pipe

    def _copy(self, node: int, source: int, target: int) -> None:
        text = b""
        with open(source, "rb", buffering=0) as pipe:
            while True:
                is_quiet = bool(text) and not select.select([pipe], [], [], _PATIENCE_S)[0]
                if not is_quiet:
                    chunk = pipe.read(_CHUNK)
                    if not chunk:
                        break
                    text += chunk
                end = len(text) if is_quiet or len(text) > _CHUNK else text.rfind(b"\n") + 1
                if end and not self._write(node, text[:end], target):
                    return  # nobody reads the output: the next write of the node fails, as without a cluster
                text = text[end:]
        if text or self._unfinished == (node, target):
            self._write(node, text + b"\n", target)

    def _write(self, node: int, text: bytes, target: int) -> bool:
        """Write text with the node before each line. Return False if nobody reads it."""
        prefix = b"[node %d] " % node
        text = _START_OF_LINE.sub(rb"\1" + prefix, text)
        with self._lock:
            try:
                if self._unfinished != (node, target):
                    text = prefix + text
                    if self._unfinished is not None:
                        _write_all(self._unfinished[1], b"\n")
                self._unfinished = None if text.endswith(b"\n") else (node, target)
                _write_all(target, text)
            except OSError:
                self._unfinished = None
                return False
        return True


def _write_all(descriptor: int, text: bytes) -> None:
    while text:
        text = text[os.write(descriptor, text) :]
