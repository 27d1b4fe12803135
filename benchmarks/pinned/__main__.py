"""`python -m benchmarks.pinned`: measures all ways, prints the tables, and writes them with a picture to docs/results.md."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .cases import case_of
from .conductor import CORES, ROOT, Measured, Processes, WayFailed, idle_share, take_turns
from .report import TOLERANCE, Row, inserted, largest_difference, picture, rows_of, sentences, table
from .ways import WAYS

ROUNDS = 5
RESULTS = ROOT / "docs" / "results.md"
TUNIX = ("google-tunix", "gin-config")
"""What is installed for Tunix: itself, and what our modules need besides."""
IDLE_SHARE = 0.1
"""Of a core: what the ways that wait may use, all together, so that they do not disturb the one that trains."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = _parser()
    args = parser.parse_args(argv)
    known = {name for case, ways in WAYS.items() for name in (case, *ways, *(f"{case}/{way}" for way in ways))}
    unknown = {name for name in args.only.split(",") if name} - known
    if unknown:
        parser.error(f"--only: nothing is called {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
    if len(os.sched_getaffinity(0)) < CORES:
        print(f"this benchmark needs {CORES} cores", file=sys.stderr)
        return 2
    found: dict[str, dict[str, Row]] = {}
    words = []
    for case, ways in chosen(args.only).items():
        failed: dict[str, str] = {}
        measured = _measured(case, ways, args, failed)
        found[case] = rows_of(case_of(case, quick=args.quick), measured)
        words += [f"### {case.capitalize()}", table(case, found[case], failed), *sentences(case, found[case])]
    print("\n" + "\n\n".join(words), flush=True)
    different = {case: difference for case, rows in found.items() if (difference := largest_difference(rows)) > TOLERANCE}
    if different:
        print(f"losses differ between ways, which do not train the same: {different}", file=sys.stderr)
        return 1
    page = args.results or (None if args.quick else RESULTS)
    if page is not None:
        _write(Path(page), words, found)
    return 0


def chosen(only: str) -> dict[str, list[str]]:
    """Case -> ways, of those that a list names: by case, by way, or as case/way; an empty list takes all.

    >>> chosen("tunix,multimodal/wavefront")
    {'multimodal': ['wavefront'], 'distillation': ['tunix']}
    """
    names = {name for name in only.split(",") if name}
    found = {case: [way for way in ways if not names or names & {case, way, f"{case}/{way}"}] for case, ways in WAYS.items()}
    return {case: ways for case, ways in found.items() if ways}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pinned", description="Compares ways of training on two pinned processes.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round, to see whether everything works; writes no page")
    parser.add_argument("--rounds", type=int, help=f"windows of each way ({ROUNDS}; with --quick 1)")
    parser.add_argument("--only", default="", help="cases and ways, separated by commas: distillation,multimodal/wavefront")
    parser.add_argument("--results", help=f"page that gets the tables, with a picture beside it ({RESULTS.relative_to(ROOT)})")
    environment = Path(tempfile.gettempdir()) / "maestro_jax-tunix"
    parser.add_argument("--environment", default=str(environment), help=f"Tunix's environment, made where there is none ({environment})")
    return parser


def _measured(case: str, ways: Sequence[str], args: argparse.Namespace, failed: dict[str, str]) -> Mapping[str, Sequence[Measured]]:
    """Starts all ways of a case and lets them take turns; notes in `failed` why one of Tunix did not run."""
    rounds = args.rounds or (1 if args.quick else ROUNDS)
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maestro_jax-pinned-")))
        started: dict[str, Processes] = {}
        for way in ways:
            spec = {"case": case, "way": way, "quick": args.quick, "windows": rounds + 1}
            try:
                python = _environment(Path(args.environment)) if way.startswith("tunix") else sys.executable
                processes = stack.enter_context(Processes(spec, logs, python=python))
                # One after the other: costs are measured while the others wait.
                processes.ready()
            except WayFailed as error:
                if not way.startswith("tunix"):
                    raise
                failed[way] = str(error).strip().splitlines()[-1]
                print(error, file=sys.stderr)
                continue
            started[way] = processes
            _say(f"{case}: {way} is ready")
        share = idle_share(list(started.values()))
        _say(f"{case}: all that wait use {share:.1%} of a core")
        if share > IDLE_SHARE:
            raise WayFailed(f"ways that wait use {share:.0%} of a core, so what is measured would be too slow")
        return take_turns(started, rounds, _say)


def _environment(folder: Path) -> str:
    """Returns the interpreter of an environment in which Tunix is installed; makes it where it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        _say(f"installing {' '.join(TUNIX)} in {folder}")
        install = [python, "-m", "pip", "install", "--quiet", *TUNIX]
        for command in ([sys.executable, "-m", "venv", folder], install):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                # Half an environment would pass for a whole one.
                shutil.rmtree(folder, ignore_errors=True)
                raise WayFailed(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return str(python)


def _write(page: Path, words: Sequence[str], found: Mapping[str, Mapping[str, Row]]) -> None:
    drawn = page.with_name("pinned.svg")
    drawn.write_text(picture(found) + "\n", encoding="utf-8")
    shown = f"![Tokens per second of all ways]({drawn.name})"
    page.write_text(inserted(page.read_text(encoding="utf-8"), "\n\n".join([*words, shown])), encoding="utf-8")
    _say(f"written: {page} and {drawn}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
