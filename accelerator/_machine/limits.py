"""How long failures are cached, and how long child processes may take."""

from __future__ import annotations

# A daemon may start before the driver does, so a failure is cached for this long only; that of an import of torch in a child,
# which takes seconds, until the environment changes or `refresh` is called.
RETRY_AFTER_S = 1.0

DRIVER_DEADLINE_S = 60.0
TORCH_DEADLINE_S = 120.0
