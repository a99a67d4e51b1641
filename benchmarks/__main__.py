"""`python -m benchmarks`: samples a second of every executor, a plain loop, other simulators, in turns"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.bench import bench, report
from fedrepro.cli.options import DeviceOption, WorkersOption, count, place
from fedrepro.core.errors import InputError
from fedrepro.executors.processes import cores
from fedrepro.experiments.runs import pick_device

PeersOption = Annotated[
    bool, typer.Option("--peers", help="Also Flower and pfl-research; `make peers` installs them")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Faster, noisier: about a minute")]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        parser=place,
        help="Write every time that was measured, after each turn",
    ),
]
RoundsOption = Annotated[
    int | None,
    typer.Option("--rounds", metavar="N", parser=count, help="Turns of each; default: 3, quick: 2"),
]
OnlyOption = Annotated[
    str,
    typer.Option(
        "--only",
        metavar="A,B",
        help="Some of: W1, ResNet-18, growth, bf16, evaluation, state, seeds; "
        "the file keeps what it has of the others",
    ),
]
SamplesOption = Annotated[
    int | None, typer.Option("--samples", parser=count, hidden=True, help="Of W1, in all")
]


def measure(
    peers: PeersOption = False,
    quick: QuickOption = False,
    file: FileOption = None,
    device: DeviceOption = "auto",
    workers: WorkersOption = None,
    rounds: RoundsOption = None,
    samples: SamplesOption = None,
    only: OnlyOption = "",
) -> None:
    "Measure samples a second: every executor, a plain loop, other simulators, in turns."
    if file is not None and (
        file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)
    ):
        raise InputError(f"--json {file}: no file can be written there")
    device, rounds = pick_device(device), rounds or (2 if quick else 3)
    groups = tuple(filter(None, only.split(",")))
    samples = samples or (4_000 if quick else 60_000)
    found = bench(samples, rounds, device, workers or cores(), peers, quick, groups, file)
    typer.echo(report(found), nl=False)


def main(argv: list[str] | None = None) -> int:
    "Exit code 0, or 2 with one line on stderr for bad input"
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(measure)
    try:
        typer.main.get_command(app).main(
            args=argv, prog_name="python -m benchmarks", standalone_mode=False
        )
    except InputError as e:
        line = str(e)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0
    except Exception as e:
        if not hasattr(e, "format_message"):
            raise
        line = e.format_message()
    else:
        return 0
    print(f"benchmarks: {' '.join(line.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
