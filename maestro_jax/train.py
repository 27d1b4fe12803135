"""`python -m maestro_jax.train --gin_file=FILE`: trains what a config file describes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import configurables
from .command_line import help_text, split_arguments
from .config import load
from .errors import MaestroError
from .run_folder import default_folder
from .terminal import Terminal

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 2 for a mistake of the user's, or 130 after Ctrl-C."""
    parser = _parser()
    try:
        rest, overrides = split_arguments(sys.argv[1:] if argv is None else argv)
        args = parser.parse_args(rest)
        if args.help is not None:
            print(help_text(parser, args.gin_file, overrides, args.help))
            return 0
        return _train(args, overrides)
    except MaestroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _train(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    config = load(args.gin_file, overrides, root="train")
    trainer: configurables.trainer.Trainer = config.build()
    with Terminal() as terminal:
        if args.dry_run:
            trainer.dry_run(terminal)
            return 0
        folder = args.workdir or default_folder(args.gin_file or "train")
        trainer.fit(folder, terminal=terminal, restart=args.restart, config_text=config.resolved())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maestro_jax.train", description="Trains a graph of sections.", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--gin_file", help="config file; a name without a folder is also found among the shipped ones")
    parser.add_argument("--workdir", help="run folder; default runs/CONFIG-TIME")
    parser.add_argument("--restart", action="store_true", help="begin anew in a run folder that holds a run; its files move to previous-N")
    parser.add_argument("--dry_run", action="store_true", help="print the plan and stop")
    about_help = "print this, the sections of --gin_file and everything configurable; with NAME, that configurable alone"
    parser.add_argument("--help", "-h", nargs="?", const="", metavar="NAME", help=about_help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
