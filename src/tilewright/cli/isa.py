"""`tilewright isa`: what a tile's kernels are on chips that are not here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.common import epilog, note, show, status
from tilewright.cli.params import ShapeParam

if TYPE_CHECKING:
    from tilewright.isa.survey import Entry
    from tilewright.ops.contract import OpSpec
    from tilewright.ops.cross import Compiled
    from tilewright.tiles.tile import Problem


_SHAPE = (4096, 4096)
_SHAPES = {"moe": (768, 2048), "ssd": (8192, 128), "conv1d": (10240, 4)}
"""Of Qwen3-30B-A3B's experts, and of Nemotron-H-8B's Mamba-2 layer: 128 heads of 64 channels."""
_TYPES = {"ssd": "p64", "conv1d": "w4"}


class _Archs(click.ParamType):
    """Names of GPU architectures with commas between."""

    name = "arch[,arch..]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        from tilewright.errors import UnsupportedError
        from tilewright.ops.cross import check_arch

        names = tuple(dict.fromkeys(part.strip() for part in str(value).split(",")))
        for name in names:
            try:
                check_arch(name)
            except UnsupportedError as error:
                self.fail(str(error), param, ctx)
        return names


class _Group(click.ParamType):
    """Values that share a scale."""

    name = "g"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value)
        if text != "-1" and not (text.isdigit() and int(text) > 0):
            self.fail(f"got {value!r}; give 32, 64, 128, 256, or -1 for all of K", param, ctx)
        return int(text)


@click.command(
    "isa",
    epilog=epilog(
        "tilewright isa --op w4a16 --arch gfx1151,gfx90a,sm_90",
        "tilewright isa --op w4a16 --arch gfx1151 --dtype bfloat16 --group 32 --m 8",
        "tilewright isa --op w4a16 --arch gfx1151 --tile 'triton(block_m=64, block_n=64, "
        "block_k=64)' \\",
        "    --tile 'triton(block_m=64, block_n=64, block_k=64, dequant=scalar)' -o md",
        "tilewright isa --op mmq --type Q4_K --arch gfx942,sm_90 --m 16",
        "tilewright isa --op moe --type Q4_K --arch gfx1151 --m 4096",
        "tilewright isa --op ssd --arch gfx90a --shape 8192,128 --group 16",
        "tilewright isa --op w4a16 --arch gfx1151 --rev main --rev .",
        "tilewright isa --spec my_kernel.py:SPEC --arch gfx90a --asm asm/",
    ),
)
@click.option("--op", help="An op with kernels for GPUs: w4a16, mmq, moe, ssd or conv1d.")
@click.option(
    "--spec",
    metavar="SPEC",
    help="Your own op: file.py:NAME, package.module:NAME, or an entry point of tilewright.ops.",
)
@click.option(
    "--arch",
    "archs",
    type=_Archs(),
    required=True,
    help="Chips to compile for, such as gfx1151,gfx90a,sm_90.",
)
@click.option(
    "--tile",
    "tiles",
    multiple=True,
    help="A tile; several are shown side by side. Fields left out are those of the default.  "
    "[default: the space's own]",
)
@click.option(
    "--type",
    "weight_type",
    help="Weight type; of ssd channels of a head, of conv1d taps.  "
    "[default: the op's first; ssd: p64, conv1d: w4]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    default="float16",
    show_default=True,
    help="Dtype of x and y.",
)
@click.option(
    "--activations",
    type=click.Choice(["float", "int8"]),
    default="float",
    show_default=True,
    help="int8: the tile for x rounded to 8 bits (mmq).",
)
@click.option("--group", type=_Group(),
              help="Values that share a scale, or -1 for all of K; of ssd the heads that share B "
                   "and C.  [default: of 4-bit codes 128, of ssd 16]")  # fmt: skip
@click.option("--shape", type=ShapeParam(),
              help="N,K of the weight; of ssd the channels of all heads and the state's dimension, "
                   "of conv1d channels and taps.  [default: 4096,4096; moe 768,2048; "
                   "ssd 128 heads,128; conv1d 10240,4]")  # fmt: skip
@click.option("--m", "m", type=click.IntRange(min=1), default=512, show_default=True,
              help="Rows of x: of moe slots, tokens times experts a token; of ssd and conv1d "
                   "tokens.")  # fmt: skip
@click.option("--rev", "revisions", multiple=True, help="Two git revisions, A and then B.")
@click.option("--repo", type=click.Path(exists=True, file_okay=False, path_type=Path),
              default=".", help="Repository of --rev.  [default: here]")  # fmt: skip
@click.option("--python", "pythons", multiple=True, help="Interpreter of each --rev.")
@click.option("--asm", type=click.Path(file_okay=False, path_type=Path),
              help="Also write the assembly to this folder.")  # fmt: skip
@click.option("-o", "--output", type=click.Choice(["terminal", "md", "json"]),
              default="terminal", show_default=True, help="Form of the result.")  # fmt: skip
def isa_command(output: str, asm: Path | None, **options: Any) -> None:
    """Compile a tile for chips that are not here and read what its kernels are.

    Prints what a wave issues in one iteration of the inner loop, registers, spills, shared memory
    and resident waves. Legality and resources, not speed: nothing runs, and nothing is timed. Needs
    triton, and no GPU.

    Exit codes: 0 holds, 1 a tile does not compile, 3 ptxas reports that it serializes wgmma, or its
    code overwrites wgmma's operands or reads them from elsewhere: results would be wrong.
    """
    if (options["op"] is None) == (options["spec"] is None):
        raise click.UsageError("give one of --op and --spec")
    if len(options["revisions"]) not in (0, 2):
        raise click.UsageError(
            f"--rev is given {len(options['revisions'])} times; give it twice: A, then B"
        )
    if options["pythons"] and len(options["pythons"]) != len(options["revisions"]):
        raise click.UsageError("--python belongs to --rev and is given twice, A's and then B's")
    from tilewright.errors import TileError
    from tilewright.report.isa import isa_json, isa_tables
    from tilewright.report.provenance import provenance

    spec, problem = _product(options)
    if options["revisions"]:
        entries = _of_revisions(options, asm)
    else:
        entries = _of_tiles(spec, problem, options, asm)
    if all(entry.error for entry in entries):
        archs: dict[str, list[str]] = {}
        for entry in entries:
            archs.setdefault(entry.error, []).append(entry.arch)
        raise TileError("; ".join(f"{', '.join(a)}: {error}" for error, a in archs.items()))
    title = f"{problem.op} {problem.weight_type} {problem.act_dtype}"
    if problem.activations != "float":
        title += f" {problem.activations}"
    if problem.group:
        title += " g=K" if problem.group == -1 else f" g={problem.group}"
    title += f" M={problem.M} N={problem.N} K={problem.K}"
    if output == "json":
        whole = isa_json(title, entries, provenance(["tilewright", *sys.argv[1:]]))
        click.echo(json.dumps(whole, indent=2, allow_nan=False))
    else:
        for index, table in enumerate(isa_tables(title, entries)):
            if index:
                click.echo()
            show(table, output)
    if any(entry.error for entry in entries):
        sys.exit(1)
    if any(entry.failures for entry in entries):
        sys.exit(3)


def _product(options: dict[str, Any]) -> tuple[OpSpec | str, Problem]:
    """The op, and the product that its tiles are compiled for; the arch is filled in later."""
    from tilewright.errors import UnsupportedError
    from tilewright.isa.compile import OPS
    from tilewright.ops.catalog import find_spec
    from tilewright.tiles.tile import Problem

    if options["spec"] is not None:
        from tilewright.ops.user_spec import load_user_spec

        # Its verdicts are not asked for here, and auditing them would run the kernel.
        spec = load_user_spec(options["spec"], audited=False)
    else:
        spec = find_spec(options["op"])
    weight_type = options["weight_type"] or _TYPES.get(spec.name, spec.weight_types[0])
    if weight_type not in spec.weight_types:
        raise UnsupportedError(
            f"--type is {weight_type!r}; {spec.name} has {', '.join(spec.weight_types)}"
        )
    if options["activations"] != "float" and spec.name in OPS and spec.name != "mmq":
        raise UnsupportedError(
            f"--activations is {options['activations']!r}; on GPUs {spec.name} takes x as it is: "
            "leave it out. mmq has int8"
        )
    n, k = options["shape"] or _shape(spec.name, weight_type)
    group = options["group"]
    if group is None:
        group = 128 if weight_type.startswith("uint4") else 16 if spec.name == "ssd" else 0
    group = -1 if group == k and spec.name != "ssd" else group
    problem = Problem(
        spec.name, "", options["dtype"], weight_type, options["activations"], options["m"], n, k,
        group,
    )  # fmt: skip
    return (spec if options["spec"] is not None else spec.name), problem


def _shape(op: str, weight_type: str) -> tuple[int, int]:
    """N and K of an op where none are asked for; of a scan as many heads whatever their channels,
    of a convolution as many taps as its type says."""
    n, k = _SHAPES.get(op, _SHAPE)
    usual, number = _TYPES.get(op, "")[1:], weight_type[1:]
    if not usual or not number.isdecimal():
        return n, k
    return (n // int(usual) * int(number), k) if op == "ssd" else (n, int(number))


def _of_tiles(
    op: OpSpec | str, problem: Problem, options: dict[str, Any], asm: Path | None
) -> list[Entry]:
    from tilewright.isa.survey import survey, write_asm
    from tilewright.tune.tile_arms import parse_tile

    tiles = [parse_tile(text) for text in options["tiles"]]

    def keep(arch: str, index: int, compiled: tuple[Compiled, ...]) -> None:
        if asm is not None:
            stem = arch if len(tiles) < 2 else f"{arch}-{chr(ord('A') + index)}"
            for path in write_asm(asm, stem, compiled):
                note(f"wrote {path}")

    with status("compiling"):
        return survey(op, problem, options["archs"], tiles, on_compiled=keep)


def _of_revisions(options: dict[str, Any], asm: Path | None) -> list[Entry]:
    from tilewright.isa.survey import survey_revision
    from tilewright.tune.revisions import checkout, repository_of

    entries: list[Entry] = []
    repository = repository_of(options["repo"])
    with checkout(repository, options["revisions"], options["pythons"], on_line=note) as revisions:
        for name, revision in zip("AB", revisions, strict=True):
            folder = None if asm is None else asm.resolve() / name
            with status(f"compiling {revision.title}"):
                entries += survey_revision(revision, _arguments(options, folder))
    return entries


def _arguments(options: dict[str, Any], asm: Path | None) -> Sequence[str]:
    """What was asked for, as another process is asked."""
    shape = options["shape"]
    given: list[tuple[str, Any]] = [
        ("--op", options["op"]),
        ("--spec", options["spec"]),
        ("--arch", ",".join(options["archs"])),
        *(("--tile", tile) for tile in options["tiles"]),
        ("--type", options["weight_type"]),
        ("--dtype", options["dtype"]),
        # Revisions from before the option know no other path.
        ("--activations", None if options["activations"] == "float" else options["activations"]),
        ("--group", options["group"]),
        ("--shape", None if shape is None else f"{shape[0]},{shape[1]}"),
        ("--m", options["m"]),
        ("--asm", asm),
    ]
    return [word for name, value in given if value is not None for word in (name, str(value))]
