"""The command line as a whole: errors are one line, exit codes are as documented, and nothing heavy is imported."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco_blob.cli import main as cli
from diloco_blob.cli import status
from diloco_blob.core.errors import Fenced, InvalidSettings

COMMANDS = ("launch", "aggregate", "status", "verify", "export", "gc", "doctor", "simulate")


def test_these_are_the_commands() -> None:
    assert tuple(cli.COMMANDS) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"diloco-blob {command} " in text.split("examples:")[1]
    assert max(len(line) for line in text.split("examples:")[1].splitlines()) <= 120


def test_help_is_quick_and_lists_the_commands() -> None:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "diloco_blob.cli.main", "--help"], capture_output=True, text=True)
    assert time.monotonic() - started < 3.0  # 0.15 s; CI machines share their cores
    assert all(re.search(rf"\n +{command} +[a-z]", done.stdout) for command in COMMANDS)


def test_no_command_imports_torch_and_help_imports_no_numpy() -> None:
    modules = ", ".join(f"diloco_blob.cli.{command}" for command in COMMANDS)
    code = (
        "import sys, contextlib\n"
        "from diloco_blob.cli.main import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None): main(['--help'])\n"
        "assert 'numpy' not in sys.modules and 'rich' not in sys.modules\n"
        f"import {modules}\n"
        "assert 'torch' not in sys.modules and 'boto3' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("diloco-blob 0.")


@pytest.mark.parametrize(
    "words",
    [
        ["gc"],
        ["status"],
        ["status", "x", "--json", "--watch"],
        ["aggregate", "x", "--once", "--watch"],
        ["aggregate", "x", "--fragment", "one"],
        ["launch", "script.py"],
        ["launch", "--islands", "0", "script.py"],
        ["launch", "--islands", "two", "script.py"],
        ["launch", "--islands", "2"],
        ["export", "x"],
    ],
)
def test_wrong_words_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_no_words_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(re.search(rf"\n +{command} +[a-z]", captured.err) for command in COMMANDS)


@pytest.mark.parametrize("command", ["aggregate", "status", "verify"])
def test_no_run_is_one_line_and_exit_1(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "memory://no-run-here"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("diloco-blob: error: there is no run at memory://no-run-here (")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (Fenced("taken over", "stop"), 3, "diloco-blob: error: taken over (stop)\n"),
        (InvalidSettings("wrong"), 2, "diloco-blob: error: wrong\n"),
        (KeyboardInterrupt(), 130, "diloco-blob: stopped\n"),
    ],
)
def test_what_commands_raise(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(status, "run", fail)
    assert cli.main(["status", "x"]) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "words",
    [
        ["status", "~nosuchuser/run"],
        ["verify", "~nosuchuser/run"],
        ["export", "~nosuchuser/run", "x"],
        ["launch", "--islands", "1", "--run", "~nosuchuser/run", "x.py"],
        ["launch", "--islands", "1", "--run", "/", "x.py"],
    ],
)
def test_odd_folders_are_one_line_and_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("diloco-blob: error: ")
    assert said.count("\n") == 1


def test_a_damaged_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert cli.main(["status", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"diloco-blob: error: run.json in {tmp_path}: not a run record")


@pytest.mark.parametrize(
    ("run", "model"),
    [
        ("demo/run", "demo/run.model"),
        ("demo/my run/", "demo/my run.model"),
        ("s3://bucket/run", "demo/model"),
    ],
)
def test_each_run_of_make_demo_has_a_model_of_its_own(run: str, model: str) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["make", "--dry-run", "--old-file=.venv/.installed", "demo", f"RUN={run}", "DATA=my texts"],
        capture_output=True,
        text=True,
        cwd=root,
        env={
            name: value for name, value in os.environ.items() if not name.startswith("M")
        },  # `make test` runs this too
    )
    words = shlex.split(done.stdout.replace("\\\n", " "))
    assert words[words.index("--run") + 1] == run, done.stderr
    assert words[words.index("--export") + 1] == model
    assert words[-2:] == ["--data", "my texts"]


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(status, "run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["status", "x"])


def test_a_reader_that_leaves_is_no_error() -> None:
    code = "import sys; from diloco_blob.cli.main import main; sys.exit(main(['verify', '--help']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    stderr = process.stderr.read().decode()
    process.wait(60)
    process.stderr.close()
    assert "Traceback" not in stderr
