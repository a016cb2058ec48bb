"""The arms of `tilewright compare`: products in this process, models, revisions, commands."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.blocks import blocks_bar
from tilewright.cli.common import model_name, note, on_device, status

if TYPE_CHECKING:
    from tilewright.measure import Ceiling
    from tilewright.ops.contract import Case, OpSpec
    from tilewright.tune.arms import CompareResult, Settings

__all__ = ["commands", "models", "product_revisions", "products"]


def _find_spec(options: dict[str, Any]) -> OpSpec:
    from tilewright.errors import UnsupportedError
    from tilewright.ops import catalog

    if options["spec"] is not None:
        spec: OpSpec = catalog.load_spec(options["spec"])
        return spec
    if options["op"] is not None:
        known = options["op"].partition("@")[0] in catalog.SPECS
        name = on_device(options["op"], options["device"])
        return (catalog.load_spec if known else catalog.find_spec)(name if known else options["op"])
    for name, spec in catalog.SPECS.items():
        if options["weight_type"] in spec.weight_types:
            return catalog.load_spec(on_device(name, options["device"]))
    raise UnsupportedError(
        f"--type is {options['weight_type']!r}; no op of the catalog multiplies it, name one by "
        f"--op or --spec. They have: "
        + "; ".join(f"{s.name}: {', '.join(s.weight_types)}" for s in catalog.SPECS.values())
    )


def _cases(spec: OpSpec, options: dict[str, Any]) -> list[Case]:
    """The products, one a shape and batch."""
    from tilewright.errors import UnsupportedError
    from tilewright.ops.contract import Case

    weight_type = options["weight_type"] or spec.weight_types[0]
    if weight_type not in spec.weight_types:
        raise UnsupportedError(
            f"--type is {weight_type!r}; {spec.name} has {', '.join(spec.weight_types)}"
        )
    group = options["group"]
    if group is None:
        group = 128 if spec.name == "w4a16" else 0
    path = (options["activations"] or ("float",))[0]
    cases = [
        spec.fit(Case(spec.name, weight_type, options["dtype"], m, n, k, group, path))
        for n, k in options["shapes"]
        for m in options["batches"]
    ]
    return list({case.id: case for case in cases}.values())


def _caches(options: dict[str, Any]) -> tuple[str, ...]:
    return ("hot", "cold") if options["cache"] == "both" else (options["cache"],)


def products(kind: str, settings: Settings, options: dict[str, Any]) -> CompareResult:
    """Two tiles, or the tiles of two tables, on products in this process."""
    from tilewright.ops.contract import spec_arch
    from tilewright.tune.arms import ArmInfo, CompareResult, run_contests
    from tilewright.tune.tile_arms import given_tiles, table_tiles, tile_contests

    spec = _find_spec(options)
    cases, caches = _cases(spec, options), _caches(options)
    arch = spec_arch(spec)
    values = options[kind]
    if kind == "tile":
        choose, titles = given_tiles(spec, *values), list(values)
    else:
        choose = table_tiles(spec, [case.problem(arch) for case in cases], *values)
        titles = [path.name for path in values]
    with blocks_bar("compare", len(cases) * len(caches) * settings.blocks) as bar:
        rows, interrupted = run_contests(
            tile_contests(
                spec,
                cases,
                choose,
                arch=arch,
                caches=caches,
                seed=options["seed"],
                threads=options["threads"],
            ),
            settings,
            on_block=bar.on_block,
            ceiling=_ceiling(arch) if options["ceiling"] else None,
        )
    a, b = (ArmInfo(n, t, "passed the gate") for n, t in zip("AB", titles, strict=True))
    return CompareResult(kind, spec.name, a, b, rows, interrupted=interrupted)


def _ceiling(arch: str) -> Ceiling:
    from tilewright.device import cpu_device
    from tilewright.errors import UnsupportedError
    from tilewright.model.peak import measure_ceiling

    if arch != cpu_device().arch:
        raise UnsupportedError(f"--ceiling is measured on this CPU; the products run on {arch}")
    with status("measuring the ceiling"):
        return measure_ceiling()


def commands(
    settings: Settings,
    *,
    command: Sequence[str],
    same_output: bool,
    time_limit: float | None,
    **_: Any,
) -> CompareResult:
    from tilewright.errors import GateError
    from tilewright.tune.arms import ArmInfo, CompareResult, run_contests
    from tilewright.tune.commands import CommandArm, command_contest

    a, b = (CommandArm(n, c, time_limit) for n, c in zip("AB", command, strict=True))
    a(), b()
    if same_output and a.outputs.keys() != b.outputs.keys():
        raise GateError("the commands print different output, so nothing is timed (--same-output)")
    with blocks_bar("compare", 1 * settings.blocks) as bar:
        rows, interrupted = run_contests(
            [command_contest(a, b, same_output=same_output)], settings, on_block=bar.on_block
        )
    if len(a.outputs) > 1 or len(b.outputs) > 1:
        note = "What the commands print changes from run to run."
    elif a.outputs.keys() == b.outputs.keys():
        note = "Both commands print the same in every run; nothing else about them was verified."
    else:
        note = "The commands print different output; nothing about them was verified."
    infos = [ArmInfo(arm.name, f"`{arm.command}`") for arm in (a, b)]
    return CompareResult(
        "command", "wall time", infos[0], infos[1], rows, notes=(note,), interrupted=interrupted
    )


def _revisions(stack: ExitStack, options: dict[str, Any]) -> list[Any]:
    from tilewright.tune.revisions import checkout, repository_of

    repository = repository_of(options["repo"])
    return stack.enter_context(
        checkout(repository, options["rev"], options["python"], on_line=note)
    )


def product_revisions(settings: Settings, options: dict[str, Any], threads: int) -> CompareResult:
    """Two revisions on products, each in its own process."""
    from tilewright.tune.arms import ArmInfo, CompareResult, run_contests
    from tilewright.tune.worker_contests import verify_workers, worker_contests
    from tilewright.tune.workers import Place, Pool

    spec = _find_spec(options)
    cases, caches = _cases(spec, options), _caches(options)
    opening = {
        "spec": _absolute(options["spec"]) or options["op"] or spec.name,
        "cases": [asdict(case, dict_factory=_public) for case in cases],
        "seed": options["seed"],
    }
    with ExitStack() as stack:
        revisions = _revisions(stack, options)
        places = [Place(r.source, r.python, threads) for r in revisions]
        pool = Pool(places)
        named = [("A", places[0]), ("B", places[1]), ("A'", places[0])]
        workers = []
        for name, place in named[: 2 if pool.shared else 3]:
            with status(f"starting {name}"):
                workers.append(stack.enter_context(pool.open(name, opening, place)))
        a, b = workers[:2]
        control = None if pool.shared else workers[2]
        with status("verifying"):
            said = verify_workers([a, b], options["seed"])
        with blocks_bar("compare", len(cases) * len(caches) * settings.blocks) as bar:
            rows, interrupted = run_contests(
                worker_contests(a, b, control, {c.id: 0 for c in cases}, caches=caches),
                settings,
                on_block=bar.on_block,
            )
        infos = [
            ArmInfo(w.name, r.title, said[w.name]) for w, r in zip((a, b), revisions, strict=True)
        ]
    return CompareResult("rev", spec.name, infos[0], infos[1], rows, interrupted=interrupted)


def _public(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if not name.startswith("_")}


def _absolute(spec: str | None) -> str | None:
    if spec is None:
        return None
    path, _, name = spec.rpartition(":")
    return f"{Path(path).resolve()}:{name}" if Path(path).is_file() else spec


def models(
    kind: str, model: Path | str, settings: Settings, options: dict[str, Any], threads: int
) -> CompareResult:
    """Two arms of one model, each in its own process, and A once more in a third."""
    from tilewright.model.compare import ModelArm, compare_models, test_tokens
    from tilewright.tune.workers import Place

    try:
        tests = list(test_tokens(options["tests"]))
    except ValueError as error:
        raise click.UsageError(f"--test: {error}") from error
    common = {
        "model": str(model.resolve()) if isinstance(model, Path) else model,
        "device": options["device"],
        "activations": (options["activations"] or ("float",))[0],
        "tests": tests,
    }
    place, same_function = Place(threads=threads), True
    with ExitStack() as stack:
        if kind == "table":
            arms = [
                ModelArm(path.name, {**common, "table": str(path.resolve())}, place)
                for path in options["table"]
            ]
        elif kind == "activations":
            values = options["activations"]
            same_function = values[0] == values[1]
            arms = [
                ModelArm(f"activations {v}", {**common, "activations": v}, place) for v in values
            ]
        else:
            arms = [
                ModelArm(r.title, common, Place(r.source, r.python, threads))
                for r in _revisions(stack, options)
            ]
        speech = _speech(options)
        with blocks_bar("compare", len(tests) * settings.blocks) as bar:
            return compare_models(
                kind,
                model_name(model),
                arms,
                tests,
                settings,
                speech=speech,
                same_function=same_function,
                status=bar.status,
                on_block=bar.on_block,
            )


def _speech(options: dict[str, Any]) -> Any:
    from tilewright.model.compare import Speech

    def read(path: Path, option: str) -> str:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise click.BadParameter(
                f"{path} is not UTF-8; convert it first", param_hint=option
            ) from error
        if not text.strip():
            raise click.BadParameter(f"{path} is empty", param_hint=option)
        return text

    prompts = text = None
    if options["prompts"] is not None:
        prompts = [s for s in read(options["prompts"], "--prompts").splitlines() if s.strip()]
    if options["text"] is not None:
        text = read(options["text"], "--text")
    return Speech(prompts, text, options["new_tokens"])
