"""Whether an error says that this kind of accelerator lacks a feature, as opposed to a failure of it.

This package raises ``NotSupported`` then. torch raises a plain RuntimeError or NotImplementedError, so that only the message
distinguishes a missing feature from a failure. The messages below are those of torch 2.6 to 2.15. If a later torch changes one,
``check`` reports the missing feature as a problem, with torch's message.
"""

from __future__ import annotations

import re

from .._machine.discovery_result import NotSupported

_MESSAGES_OF_TORCH = re.compile(
    "|".join(
        (
            "Backend doesn't support ",  # an accelerator's device guard without streams, events or capabilities
            "Could not run '",  # an op without a kernel
            "Graph is not supported on device type",  # torch.accelerator.Graph
            "No backend type associated with device type",  # torch.distributed, if no backend is registered for the device
        )
    )
)


def is_not_offered(error: BaseException) -> bool:
    """Return whether an error, or the one that it was raised from, says that the accelerator lacks a feature."""
    if isinstance(error, NotSupported) or isinstance(error.__cause__, NotSupported):
        return True
    return isinstance(error, RuntimeError) and _MESSAGES_OF_TORCH.match(str(error)) is not None


def says_not_offered(line: str) -> bool:
    """Return the same for the error of a child process, of which only the type and the message are known: "Type: message"."""
    return _MESSAGES_OF_TORCH.match(line.partition(": ")[2]) is not None
