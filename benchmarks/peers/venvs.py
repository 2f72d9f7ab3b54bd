"""A virtual environment for each peer, made on first use from `requirements/<name>.txt`, pinned.

Each gets a copy of torch of its own: about 1 GB for all that run on Python 3.11, from pip's cache where it can be. Our
own workers run in the environment that runs the bench.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE / ".venvs"
OWN = ""
NEEDS_312 = {"gradientmail"}
"""These refuse to be installed on an older Python."""

_RELEASES = ("torch", "hivemind", "torchft", "flwr", "flwr-serverless", "gradientmail", "boto3", "diloco-blob")


def python_of(name: str) -> Path:
    """The interpreter of an environment; of the bench's own for the empty name."""
    return Path(sys.executable) if name == OWN else FOLDER / name / "bin" / "python"


def ensure(name: str, python312: str | None) -> str:
    """Make an environment unless it is there already with these requirements.

    Args:
        name: Of the environment; the empty name is the bench's own and needs nothing.
        python312: A Python 3.12 or newer, for those that need one; None if nobody knows any.

    Returns:
        Why it cannot be had here, in one line; empty if it can.
    """
    if name == OWN:
        return ""
    requirements = HERE / "requirements" / f"{name}.txt"
    done = FOLDER / name / ".installed"
    if done.exists() and done.read_text() == requirements.read_text():
        return ""
    python = sys.executable
    if name in NEEDS_312 and sys.version_info < (3, 12):
        if python312 is None:
            return "needs Python 3.12 or newer: give --python312 PATH"
        python = python312
    print(f"installing {name} into {FOLDER / name} …", flush=True)
    for words in (
        [python, "-m", "venv", str(FOLDER / name)],
        [str(python_of(name)), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)],
    ):
        try:
            made = subprocess.run(words, check=False, capture_output=True, text=True)
        except OSError as error:
            return f"cannot be installed: {error}"
        if made.returncode:
            lines = [line for line in made.stderr.splitlines() if line.startswith("ERROR")] or [made.stderr.strip()]
            return f"cannot be installed: {lines[-1][:300]}"
    done.write_text(requirements.read_text())
    return ""


def versions(name: str) -> dict[str, str]:
    """Releases that count, in an environment."""
    program = (
        "import importlib.metadata as m, json, platform\n"
        "said = {'python': platform.python_version()}\n"
        f"for name in {_RELEASES!r}:\n"
        "    try: said[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(said))"
    )
    words = [str(python_of(name)), "-c", program]
    said: dict[str, str] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return said
