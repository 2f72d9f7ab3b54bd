"""The command line: which commands exist, and what becomes of their errors.

Each command is a module of this package with `configure(parser)` and `run(args) -> int`; it is imported only when it is
typed, so that `--help` is quick. Torch is never imported from here.

    diloco-blob --help
    python -m diloco_blob.cli.main status demo/run

Exit codes: 0 done, 1 a promise is broken or the run failed, 2 the words or settings are wrong, 3 taken over by another
process, 4 the store does not answer, 130 and 143 stopped by Ctrl-C and by SIGTERM.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Generator, Sequence
from typing import Any

from diloco_blob.core.errors import DilocoError

COMMANDS = {
    "launch": "run a script as several islands here, with an aggregator",
    "aggregate": "close, merge and commit what has arrived: one pass, or a loop",
    "status": "show how far a run is, from its bucket alone",
    "verify": "audit a run's bucket from end to end",
    "export": "write a run's model in the Hugging Face layout",
    "gc": "delete what no kept version of a run needs",
    "doctor": "test whether a run can be trained at a URL, by whom and how fast",
    "simulate": "play the protocol under faults, from one seed after the other",
}

_EPILOG = """\
examples:
  diloco-blob launch --islands 3 workers/train.py        train on three islands that share a fresh folder
  diloco-blob aggregate s3://bucket/run --watch          be the aggregator of a run
  diloco-blob status s3://bucket/run                     how far is it?
  diloco-blob verify s3://bucket/run                     is everything in the bucket as promised?
  diloco-blob export s3://bucket/run model/              take the model away
  diloco-blob gc s3://bucket/run --dry-run               what lies there that nobody needs?
  diloco-blob doctor s3://bucket/run                     can a run be trained there?

A run is named by its URL: s3://bucket/prefix, gs://bucket/prefix, file:///path, or the path of a folder.
Exit codes: 0 done, 1 a promise is broken or the run failed, 2 the words or settings are wrong, 3 taken over by another
process, 4 the store does not answer.
`diloco-blob COMMAND --help` explains a command.
"""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Epilogs as they are written, and room for the longest option before its help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _iter_indented_subactions(self, action: argparse.Action) -> Generator[argparse.Action, None, None]:
        """The commands, not indented: argparse forgets the indent when it reckons the width of their column."""
        get_subactions = getattr(action, "_get_subactions", None)
        if get_subactions is not None:
            yield from get_subactions()


class CommandParser(argparse.ArgumentParser):
    """The parser of one command; it asks the command's module for its arguments when they are first needed."""

    command = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `argparse.ArgumentParser`; on first use the command's module is imported and adds its arguments."""
        if self.command:
            module = importlib.import_module(f"diloco_blob.cli.{self.command}")
            self.command = ""
            module.configure(self)
            self.set_defaults(run_command=module.run)
        return super().parse_known_args(args, namespace)


class Version(argparse.Action):
    """Print the installed version and leave; looked up only when asked for."""

    def __init__(self, option_strings: Sequence[str], **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show the version and leave")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """See `argparse.Action`."""
        from importlib.metadata import version

        print(f"diloco-blob {version('diloco-blob')}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """The whole command line, with the commands' own arguments still to come."""
    parser = argparse.ArgumentParser(
        prog="diloco-blob",
        description="Train one model on islands that share nothing but a bucket.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=CommandParser)
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=HelpFormatter,
        )
        command.command = name
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: Its words; None takes the process's own.

    Returns:
        The exit code. Words that argparse refuses leave with `SystemExit(2)`, as argparse has it.
    """
    try:
        parser = make_parser()
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help(sys.stderr)
            return 2
        code: int = args.run_command(args)
        sys.stdout.flush()
    except DilocoError as error:
        from diloco_blob.wire import printable  # imports numpy, for which `--help` need not wait

        print(f"diloco-blob: error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("diloco-blob: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`). Nothing may be flushed at exit, or Python complains about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def entry() -> None:
    """The console script `diloco-blob`."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
