"""What has no other place, and the names of branches, calls and returns.

The generator writes those itself: they depend on how the function runs.
"""

from __future__ import annotations

from ..code import Code
from ..operations import Choices, Table, Waiting
from ..syntax import Instruction
from ..types import TYPES

TABLE = Table("control")


def _structural(code: Code, instruction: Instruction, choices: Choices) -> str:
    raise AssertionError(f"the generator writes {instruction.opcode}")


def _trap(code: Code, instruction: Instruction, choices: Choices) -> str:
    return 'services->fail(k, KERNEL_FAILED, "it executes trap");'


def _breakpoint(code: Code, instruction: Instruction, choices: Choices) -> str:
    return 'services->fail(k, KERNEL_FAILED, "it executes brkpt");'


def _sleep(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    """Other threads run; how long the thread sleeps is a hint."""
    return Waiting("", "", "WAIT_POLITELY", "WARP_SYNC")


def _nothing(code: Code, instruction: Instruction, choices: Choices) -> str:
    return ";"


def _absolute_differences(code: Code, instruction: Instruction, choices: Choices) -> str:
    """vabsdiff2 and vabsdiff4: of the bytes or halves of a and b, added to c with .add."""
    width = 16 if instruction.opcode.startswith("vabsdiff2") else 8
    a, b, c = (code.read(operand, TYPES["u32"]) for operand in instruction.operands[1:4])
    signs = ", ".join("true" if choices[name] == "s32" else "false" for name in "DAB")
    flags = ", ".join("true" if choices.get(name) else "false" for name in ("sat", "add"))
    value = f"absolute_differences({a}, {b}, {c}, {width}, {signs}, {flags})"
    return code.write(instruction.operands[0], TYPES["u32"], value)


for _pattern in ("bra{.uni}", "brx.idx{.uni}", "call{.uni}", "ret{.uni}", "exit"):
    TABLE.add(_pattern, _structural, results=0, is_pure=False)
TABLE.add("trap", _trap, results=0, is_pure=False)
TABLE.add("brkpt", _breakpoint, results=0, is_pure=False)
TABLE.add("nanosleep.u32", _sleep, results=0, is_pure=False, waits="lanes")
TABLE.add("pmevent{.mask}", _nothing, results=0, is_pure=False)
TABLE.add("griddepcontrol.action", _nothing, results=0, is_pure=False, action="launch_dependents wait")
TABLE.add("setmaxnreg.action.sync.aligned.u32", _nothing, results=0, is_pure=False, action="inc dec")
for _name in ("vabsdiff2", "vabsdiff4"):
    for _suffix in ("{.sat}", ".add"):
        TABLE.add(f"{_name}.D.A.B{_suffix}", _absolute_differences, D="u32 s32", A="u32 s32", B="u32 s32")
