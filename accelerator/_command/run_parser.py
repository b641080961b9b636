"""The parser that ``simulate`` and ``rehearse`` share: their options in the settings table, then after ``--`` the command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from ..simulation import _settings
from ..simulation._settings import known_gpus
from ..simulation._settings.values import Choice, Flag
from . import terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..simulation._settings import Option, Setting

_USAGE = 2


class RunParser(terminal.Parser):
    """A parser of the options that the table of settings has for a command, and of a command to run."""

    def __init__(self, name: Literal["simulate", "rehearse"], description: str, epilog: str) -> None:
        super().__init__(
            prog=f"python -m accelerator {name}",
            usage="%(prog)s [OPTIONS] -- COMMAND...",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._settings: list[Setting] = []
        for setting in _settings.SETTINGS:
            option: Option | None = getattr(setting, name)
            if option is not None:
                self._settings.append(setting)
                self.add_argument(setting.flag, **_describe(setting, option))

    def parse(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, which are None if they are not given, and the command, which may be empty.

        Exit if the usage is wrong. `environment` checks the values of its parameters.
        """
        # Added last, so that the help lists it after the options.
        self.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command to run, after --")
        options = self.parse_args(argv)
        for setting in self._settings:
            words: str | Sequence[str] | None = getattr(options, setting.name)
            if words is not None:
                setattr(options, setting.name, self._convert(setting, [words] if isinstance(words, str) else words))
        command: list[str] = options.command
        return options, command[1:] if command[:1] == ["--"] else command

    def _convert(self, setting: Setting, words: Sequence[str]) -> Any:
        try:
            value = setting.type.parse(words)
            if setting not in _settings.PARAMETERS:
                setting.type.encode(setting.name, value, 0)
        except ValueError as error:
            self.error(f"argument {setting.flag}: {error}")
        return value

    def parameters(self, options: argparse.Namespace) -> dict[str, Any]:
        """Return the parameters of `environment` that the command line gives."""
        given = {setting.name: getattr(options, setting.name, None) for setting in _settings.PARAMETERS}
        if getattr(options, "fault", None):
            given["faults"] = [*(given["faults"] or ()), *options.fault]
        return {name: value for name, value in given.items() if value is not None}

    def require(self, command: list[str]) -> None:
        """Exit if there is no command."""
        if not command or not command[0]:
            self.error("no command: give one after --")


def _describe(setting: Setting, option: Option) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for an option, whose value is a word, or a sequence of words."""
    described: dict[str, Any] = {"dest": setting.name, "help": option.help}
    if isinstance(setting.type, Flag):
        return {**described, "action": "store_const", "const": ()}
    if isinstance(setting.type, Choice):
        described["choices"] = setting.type.choices
    return {**described, "metavar": option.metavar, "action": "append" if option.is_repeated else "store"}


def report_error(name: str, message: str) -> int:
    """Print one line that says what is wrong, and return the exit status."""
    print(f"python -m accelerator {name}: {message}", file=sys.stderr)
    return _USAGE


def report_unknown_names(name: str, gpus: Iterable[str]) -> None:
    """Print one line for each name of a GPU that sets neither its memory nor its capability."""
    for each in dict.fromkeys(gpus):
        if known_gpus.find(each) is None:
            report_error(name, f"no GPU named {each!r} is known, so the name sets neither memory nor capability")
