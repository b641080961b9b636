"""``python docs/make_report_picture.py [FILE]``: draw README's picture of the report, docs/report.svg.

The report is that of ``python -m accelerator`` on a simulated machine of three GPUs, of which one is hidden and one is in use.
Only the names of the host and of the user are replaced.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent

MACHINE = ("--gpus", "3", "--memory", "80GiB", "--name", "NVIDIA H100 80GB HBM3")

# A program that holds memory on GPU 0 asks for the report, of a process that sees two of the GPUs.
PROGRAM = """
import os, subprocess, sys
import torch
held = torch.empty(20 << 30, dtype=torch.uint8, device="cuda:0")  # reserved; nothing is written
ask = '''
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
sys.exit(subprocess.run([sys.executable, "-c", ask], env=environment).returncode)
"""

CHARACTER, LINE, MARGIN, SIZE = 8.4, 19, 16, 14
COLORS = {"31": "#f47067", "32": "#8ddb8c"}
STYLES = {"1": 'font-weight="bold"', "2": 'opacity="0.6"'}


def report() -> str:
    """What the command prints, with a terminal's colors."""
    command = [sys.executable, "-m", "accelerator", "simulate", *MACHINE, "--", sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, encoding="utf-8", timeout=300)
    return done.stdout


def plain(text: str) -> str:
    """The text without its colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def svg(text: str) -> str:
    """A picture of a terminal's text, one element for each run of equal style."""
    lines = text.rstrip("\n").split("\n")
    width = max(len(plain(line)) for line in lines) * CHARACTER + 2 * MARGIN
    height = len(lines) * LINE + 2 * MARGIN
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}">',
        f"<title>{html.escape(plain(lines[0]))}</title>",
        '<rect width="100%" height="100%" rx="6" fill="#22272e"/>',
        f'<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{SIZE}" fill="#cdd9e5" xml:space="preserve">',
    ]
    for number, line in enumerate(lines):
        y = MARGIN + (number + 0.75) * LINE
        drawn.extend(_runs(line, y))
    return "\n".join([*drawn, "</g>", "</svg>", ""])


def _runs(line: str, y: float) -> list[str]:
    drawn: list[str] = []
    column, codes = 0, ""
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        if part.startswith("\x1b"):
            codes = part[2:-1]
        elif part:
            style = "".join(
                f' fill="{COLORS[code]}"' if code in COLORS else f" {STYLES[code]}"
                for code in codes.split(";")
                if code in COLORS or code in STYLES
            )
            x = MARGIN + column * CHARACTER
            length = len(part) * CHARACTER
            drawn.append(f'<text x="{x:.1f}" y="{y:.1f}" textLength="{length:.1f}"{style}>{html.escape(part)}</text>')
            column += len(part)
    return drawn


def main(arguments: list[str]) -> None:
    path = Path(arguments[0]) if arguments else HERE / "report.svg"
    path.write_text(svg(report()), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
