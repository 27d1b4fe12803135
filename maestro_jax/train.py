"""`python -m maestro_jax.train --gin_file=FILE`: trains what a config file describes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import jax

from . import configurables
from .cluster import connect, leave
from .command_line import help_text, split_arguments
from .config import load
from .errors import ConfigError, MaestroError
from .files import write_output
from .pace import Preempted
from .run_folder import default_folder
from .terminal import Terminal, screen_of

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
PREEMPTED = 75
"""Exit code after SIGTERM, when a checkpoint was written: try again later (EX_TEMPFAIL of sysexits.h)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 2 for a mistake of the user's, 75 after SIGTERM, or 130 after Ctrl-C."""
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
    except Preempted:
        print("ended by SIGTERM; the same command goes on", file=sys.stderr)
        return PREEMPTED


def _preempted(number: int, frame: FrameType | None) -> NoReturn:
    if jax.distributed.is_initialized():
        # The others wait for this one, and an orderly end would wait for them.
        print("ended by SIGTERM before training; the same command begins", file=sys.stderr, flush=True)
        os._exit(PREEMPTED)
    raise Preempted


def _train(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    # Until training begins and takes care of it itself: nothing has been trained that could be lost.
    signal.signal(signal.SIGTERM, _preempted)
    # Until there is something to tell, asking where the run stands would end it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    group = connect()
    config = load(args.gin_file, overrides, root="train")
    trainer: configurables.trainer.Trainer = config.build()
    if not group.first and (args.dump_workload or args.dry_run):
        return 0
    with screen_of(group) as terminal:
        if args.dump_workload:
            dump_workload(trainer, args.dump_workload, args.dump_step, terminal)
            return 0
        if args.dry_run:
            trainer.dry_run(terminal)
            return 0
        folder = args.workdir or default_folder(args.gin_file or "train")
        trainer.fit(folder, terminal=terminal, restart=args.restart, verify_step=args.verify_step, config_text=config.resolved())
    return 0


def dump_workload(trainer: configurables.trainer.Trainer, path: str, step: int, terminal: Terminal) -> None:
    """Writes the workload of some steps as a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    workload = trainer.workload(step)
    write_output(path, json.dumps(workload.to_json()), what="workload", flag="--dump_workload", kind=ConfigError)
    samples = sum(map(len, workload.steps))
    terminal.finish([f"{path}: {workload.name}, {samples} samples; python -m maestro_jax.simulate --workload {path} --compare"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maestro_jax.train", description="Trains a graph of sections.", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--gin_file", help="config file; a name without a folder is also found among the shipped ones")
    parser.add_argument("--workdir", help="run folder; default runs/CONFIG. A run that lies there goes on")
    parser.add_argument("--restart", action="store_true", help="begin anew in a run folder that holds a run; its files move to previous-N")
    verify_help = "before training, compare every gradient with one program on a few samples; refuse to train when they differ"
    parser.add_argument("--verify_step", action="store_true", help=verify_help)
    dump_help = "write the work of a step (and of those scheduled with it) for maestro_jax.simulate, and stop"
    parser.add_argument("--dump_workload", metavar="FILE", help=dump_help)
    parser.add_argument("--dump_step", type=int, default=0, metavar="N", help="which step, from 0; default 0")
    parser.add_argument("--dry_run", action="store_true", help="print the plan and stop")
    about_help = "print this, the sections of --gin_file and everything configurable; with NAME, that configurable alone"
    parser.add_argument("--help", "-h", nargs="?", const="", metavar="NAME", help=about_help)
    return parser


if __name__ == "__main__":
    leave(main())
