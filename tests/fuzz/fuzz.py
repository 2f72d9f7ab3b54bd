"""Coverage-guided fuzzing of one reader with atheris (libFuzzer).

    python tests/fuzz/fuzz.py TARGET [--seconds N | --runs N] [--seed N]

It begins with valid bytes and with all that was ever found (`tests/fuzz/corpus/TARGET`), and ends with 0 if nothing
was found. A finding is printed with its bytes and kept in the working folder as `crash-…`: put it into the corpus,
where `test_fuzz_targets.py` replays it for ever. What it learned is kept with `--keep FOLDER`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

HERE = Path(__file__).parent
INPUT_BYTES_MAX = 8192

with atheris.instrument_imports(include=["diloco_blob", "targets"]):
    sys.path.insert(0, str(HERE))
    from targets import TARGETS


def main() -> None:
    """Read the command line, write the seeds, and hand over to libFuzzer, which ends the process."""
    parser = argparse.ArgumentParser(description="Fuzz one reader.")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=0, help="stop after this long; 0: only after --runs")
    parser.add_argument("--runs", type=int, default=-1, help="stop after this many inputs; -1: never")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations")
    parser.add_argument("--keep", type=Path, help="folder for inputs that reached something new")
    args = parser.parse_args()
    target = TARGETS[args.target]
    with tempfile.TemporaryDirectory() as scratch:
        kept, seeds = args.keep or Path(scratch, "kept"), Path(scratch, "seeds")
        kept.mkdir(parents=True, exist_ok=True)
        seeds.mkdir()
        for number, seed in enumerate(target.seeds()):
            (seeds / str(number)).write_bytes(seed)
        found = HERE / "corpus" / args.target
        folders = [str(folder) for folder in (kept, seeds, found) if folder.is_dir()]
        options = [
            f"-max_total_time={args.seconds}",
            f"-runs={args.runs}",
            f"-seed={args.seed}",
            f"-max_len={INPUT_BYTES_MAX}",
        ]
        atheris.Setup([sys.argv[0], *options, *folders], target.run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
