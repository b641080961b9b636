"""While a stream captures nothing may run: an op is put on the stream, to compute at each replay of the graph."""

from __future__ import annotations
