"""Why a kernel cannot be translated."""

from __future__ import annotations


class Refused(Exception):
    """PTX that is not translated; the message names it."""
