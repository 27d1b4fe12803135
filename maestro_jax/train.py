"""`python -m maestro_jax.train --gin_file=FILE`: trains what a config file describes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import configurables
from .command_line import help_text, split_arguments
from .config import load
from .errors import MaestroError
from .run_folder import RunFolder, default_folder
from .terminal import Terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 for a mistake of the user's."""
    parser = _parser()
    try:
        rest, overrides = split_arguments(sys.argv[1:] if argv is None else argv)
        args = parser.parse_args(rest)
        if args.help:
            print(help_text(parser, args.gin_file, overrides))
            return 0
        return _train(args, overrides)
    except MaestroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _train(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    config = load(args.gin_file, overrides, root="train")
    trainer: configurables.trainer.Trainer = config.build()
    with Terminal() as terminal:
        if args.dry_run:
            trainer.show_plan(terminal)
            return 0
        path = Path(args.workdir) if args.workdir else default_folder(args.gin_file or "train")
        folder = RunFolder(path, restart=args.restart, set_by="--workdir")
        trainer.fit(folder=folder, terminal=terminal, config_text=config.resolved())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maestro_jax.train", description="Trains a graph of sections.", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--gin_file", help="config file; a name without a folder is also found among the shipped ones")
    parser.add_argument("--workdir", help="run folder; default runs/CONFIG-TIME")
    parser.add_argument("--restart", action="store_true", help="begin anew in a run folder that holds a run; its files move to previous-N")
    parser.add_argument("--dry_run", action="store_true", help="print the plan and stop")
    parser.add_argument("--help", "-h", action="store_true", help="print this, the sections of --gin_file and everything configurable")
    return parser


if __name__ == "__main__":
    sys.exit(main())
