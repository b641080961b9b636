"""Faults in the command line and in the pytest plug-in."""

from __future__ import annotations

from .mutant import Mutant

LINE = "command/test_command_line.py"
REPORT = "command/test_report.py"
PLUGIN = "simulation/test_pytest_plugin.py"

MUTANTS = (
    Mutant(
        "_command/terminal.py",
        "    except BrokenPipeError:\n",
        "    except ConnectionResetError:\n",
        (f"{LINE}::test_a_reader_that_is_gone[arguments0-0]",),
    ),
    Mutant(
        "_command/terminal.py",
        "        _leave(out)\n        raise Unwritable(",
        "        raise Unwritable(",
        (f"{LINE}::test_a_full_disk[arguments0]",),
    ),
    Mutant(
        "_command/terminal.py",
        "text = text.translate(_PLAIN).encode(",
        "text = text.encode(",
        (f"{LINE}::test_a_terminal_without_unicode[report-ascii]",),
    ),
    Mutant("__main__.py", "allow_abbrev=False", "allow_abbrev=True", (f"{LINE}::test_wrong_usage",)),
    Mutant(
        "__main__.py",
        "indent=None if watched else 2",
        "indent=2",
        (f"{REPORT}::test_a_document_a_line_for_a_reader_that_leaves",),
    ),
    Mutant(
        "_command/picture.py",
        "textwrap.wrap(text, WIDTH,",
        "textwrap.wrap(text, WIDTH + 20,",
        (f"{REPORT}::test_text_fits_a_terminal[machine0]",),
    ),
    Mutant(
        "_command/picture.py",
        'in with_instances and not device["mig"]]',
        "in with_instances]",
        (f"{REPORT}::test_what_is_hidden",),
    ),
    Mutant(
        "_command/report.py",
        "None if usable is None else device.index in usable",
        "None if usable is None else True",
        (f"{REPORT}::test_strict",),
    ),
    Mutant(
        "_command/report.py",
        '{"available": False, "problem": str(error)}',
        '{"available": False, "problem": None}',
        (f"{REPORT}::test_what_failed_is_named",),
    ),
    Mutant(
        "_command/check.py",
        "for cause in wrong[checked.dead is not None :]:",
        "for cause in wrong:",
        ("command/test_check.py::test_a_broken_driver_is_one_line",),
    ),
    Mutant(
        "_command/cluster.py",
        'make no sense: {error}", _USAGE)',
        'make no sense: {error}", 1)',
        ("command/test_cluster.py::test_variables_that_make_no_sense",),
    ),
    Mutant(
        "_command/cluster.py",
        "_follow(store, place, time.monotonic() + timeout)",
        "_follow(store, place, deadline)",
        ("command/test_cluster.py::test_a_late_rank_0_is_waited_for_as_long_as_it_waits_itself",),
    ),
    Mutant(
        "_command/cluster.py",
        'no word from rank 0 by the deadline", 1))',
        'no word from rank 0 by the deadline", 0))',
        ("command/test_cluster.py::test_a_rank_0_that_says_nothing",),
    ),
    Mutant(
        "simulation/pytest_plugin.py",
        "\nif TYPE_CHECKING:\n",
        "\nfrom .. import discovery as _\n\nif TYPE_CHECKING:\n",
        (f"{PLUGIN}::test_nothing_is_done_unasked",),
    ),
    Mutant(
        "simulation/pytest_plugin.py",
        "        if count < wanted:\n",
        "        if count <= wanted:\n",
        (f"{PLUGIN}::test_a_session_on_simulated_gpus[workers0]",),
    ),
    Mutant(
        "simulation/_pytest/session.py",
        'raise pytest.UsageError(f"cannot simulate GPUs: {error}") from None',
        "raise",
        (f"{PLUGIN}::test_machines_that_cannot_be_simulated_skip",),
    ),
    Mutant(
        "simulation/_pytest/machines.py",
        "if self._problem is None:",
        "if True:",
        (f"{PLUGIN}::test_a_server_that_ends",),
    ),
    Mutant(
        "simulation/_pytest/machines.py",
        'item.add_marker(pytest.mark.skip(reason=f"cannot simulate GPUs: {problem}"))',
        "pass",
        (f"{PLUGIN}::test_machines_that_cannot_be_simulated_skip",),
    ),
    Mutant(
        "simulation/_pytest/machines.py",
        ' or ended.status or "teardown" in reported:',
        " or ended.status:",
        (f"{PLUGIN}::test_processes_that_end_early",),
    ),
    Mutant(
        "simulation/_pytest/server.py",
        "poisoned = None if discovery.is_fork_safe() else _POISONED",
        "poisoned = None",
        (f"{PLUGIN}::test_collecting_that_initializes_the_driver",),
    ),
    Mutant(
        "_command/picture.py",
        ' if entry["reading"] != UNREAD',
        "",
        ("command/test_report.py::test_a_variable_that_is_not_read_hides_nothing",),
    ),
)
