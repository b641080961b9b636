"""``python docs/make_report_picture.py [FOLDER]``: draw the pictures of terminals, docs/report.svg and docs/races.svg.

The first shows the output of ``python -m accelerator`` on a machine with three simulated GPUs: one is hidden, one in use. Only
the names of the host and of the user are replaced. The second shows the report of the race in README.
"""

from __future__ import annotations

import html
import io
import os
import re
import subprocess
import sys
import tempfile
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
environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,2", "PYTHONIOENCODING": "utf-8", "COLUMNS": "%d"}
sys.exit(subprocess.run([sys.executable, "-c", program], env=environment).returncode)
"""

# The narrower, the larger the letters on a phone. The report fits 60 columns.
COLUMNS = 66
RACE_COLUMNS = 80


def report(python: str) -> str:
    """Return the output of the command, with a terminal's colors."""
    command = [python, "-m", "accelerator", "simulate", *MACHINE, "--", python, "-W", "ignore", "-c", PROGRAM % COLUMNS]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, encoding="utf-8", timeout=300).stdout


def race(python: str) -> str:
    """Return what the command of README reports about README's race, wrapped as by a terminal."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n([^`]*copies = [^`]*)```", text)
    (command,) = re.findall(r"^(python -m accelerator simulate --races .*)$", text, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(program, encoding="utf-8")
        line = [python, *command.split()[1:-2], python, "train.py"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            line, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False
        )
        if done.returncode != 1:
            sys.exit(done.stderr)
        reported = done.stderr[done.stderr.index("race:") :].replace(f"{folder}/", "")
    return f"\x1b[1m$ {command}\x1b[0m\n{done.stdout}{reported}"


def draw(text: str, title: str, columns: int) -> str:
    """Return a terminal's text as an SVG picture."""
    console = Console(record=True, width=columns, file=io.StringIO(), color_system="standard", force_terminal=True)
    console.print(Text.from_ansi(text))  # rich omits the clip path of the last line, which is empty here
    picture = console.export_svg(title=title, unique_id="terminal")
    # Remove fonts from the web. The picture uses a font of the viewer.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    picture = picture.replace("font-family: Fira Code,", "font-family: ui-monospace, Menlo, Consolas, DejaVu Sans Mono,")
    return _TEXT.sub(_place_columns, picture)


_TEXT = re.compile(
    r'<text class="([\w-]+)" x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)" (clip-path="[^"]*")>([^<\n]+)</text>'
)


def _place_columns(match: re.Match[str]) -> str:
    """Give each part between wide gaps its own place, because the viewer's font may have other widths."""
    style, left, y, width, clip, content = match.groups()
    content = html.unescape(content)
    cell = float(width) / len(content)
    parts = ""
    for part in re.finditer("[^\xa0]+(?:\xa0[^\xa0]+)*", content):
        text = html.escape(part[0]).replace("\xa0", "&#160;")
        x, length = float(left) + part.start() * cell, len(part[0]) * cell
        parts += f'<text class="{style}" x="{x:g}" y="{y}" textLength="{length:g}" {clip}>{text}</text>'
    return parts


def main(arguments: list[str]) -> None:
    """Draw the pictures into the folder of the first argument; ``--python`` names the Python with a CUDA build of torch."""
    python = arguments[arguments.index("--python") + 1] if "--python" in arguments else sys.executable
    folders = [argument for argument in arguments if argument not in ("--python", python)]
    folder = Path(folders[0]) if folders else HERE
    pictures = {
        "report.svg": draw(report(python), "python -m accelerator", COLUMNS),
        "races.svg": draw(race(python), "a race", RACE_COLUMNS),
    }
    for name, picture in pictures.items():
        (folder / name).write_text(picture, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main(sys.argv[1:])
