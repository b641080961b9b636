"""``python docs/make_report_picture.py [FILE]``: draw the report's picture, docs/report.svg.

The picture shows the output of ``python -m accelerator`` on a machine with three simulated GPUs: one is hidden, one in use.
Only the names of the host and of the user are replaced.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
ROOT = HERE.parent

MACHINE = ("--gpus", "3", "--memory", "80GiB", "--name", "NVIDIA H100 80GB HBM3")

# Allocates memory on GPU 0 and starts another program, which sees two of the GPUs and prints the report.
PROGRAM = """
import os, subprocess, sys
import torch
tensor = torch.empty(64 << 30, dtype=torch.uint8, device="cuda:0")  # reserved; nothing is written
program = '''
import sys
from accelerator._command import report, report_text
facts = report.collect()
facts["host"] = "node"
for device in facts["devices"]:
    for process in device["processes"] or ():
        process["user"] = "user"
sys.stdout.write(report_text.format_report(facts, color=True))
'''
environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,2", "PYTHONIOENCODING": "utf-8"}
sys.exit(subprocess.run([sys.executable, "-c", program], env=environment).returncode)
"""


def report(python: str) -> str:
    """Return the output of the command, with a terminal's colors."""
    command = [python, "-m", "accelerator", "simulate", *MACHINE, "--", python, "-W", "ignore", "-c", PROGRAM]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, encoding="utf-8", timeout=300).stdout


def draw(text: str) -> str:
    """Return a terminal's text as an SVG picture."""
    console = Console(record=True, width=80, file=io.StringIO(), color_system="standard", force_terminal=True)
    console.print(Text.from_ansi(text), soft_wrap=True)  # rich omits the clip path of the last line, which is empty here
    picture = console.export_svg(title="python -m accelerator", unique_id="report")
    # Remove fonts from the web. The picture uses a font of the viewer.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    return picture.replace("font-family: Fira Code,", "font-family: ui-monospace, Menlo, Consolas, DejaVu Sans Mono,")


def main(arguments: list[str]) -> None:
    """Draw the picture into the file of the first argument; ``--python`` names the Python with a CUDA build of torch."""
    python = arguments[arguments.index("--python") + 1] if "--python" in arguments else sys.executable
    files = [argument for argument in arguments if argument not in ("--python", python)]
    path = Path(files[0]) if files else HERE / "report.svg"
    path.write_text(draw(report(python)), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
