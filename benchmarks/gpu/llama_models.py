"""llama-bench's tests of one GGUF file, by llama-bench and by ours, in paired blocks.

A block runs llama-bench, in a process of its own that loads the model and warms up each test before
it times it, then ours, warmed up likewise, and llama-bench once more, the control; in random
position-balanced order. Loading is timed in neither.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf_models import check, folder_for
from llama_operators import BASE, OURS
from record import model_record
from synthetic_gguf import SHAPES, Shape, write_model

from tilewright.measure import Block, Comparison, StateProbe, judge
from tilewright.measure.sample import block_orders

__all__ = ["OPTIONS", "judged", "measure_model", "run_blocks", "shape_of"]

OPTIONS = ("-fa", "1", "-ub", "2048", "-ngl", "99")
"""Of llama-bench: flash attention, 2048 tokens at a time, all layers on the GPU."""

_CONTROL = "control"
_FEW = 16  # tokens from which the check generates
_KEPT = 24  # tokens of a text whose logits must be the same after timing
_BUILD = (*llama_cpp.BUILD_FIELDS, "gpu_info", "n_gpu_layers")

Arm = Callable[[], dict[str, float]]
"""Runs every test once: microseconds by test."""


def shape_of(args: argparse.Namespace) -> Shape:
    """Of the synthetic model."""
    shape = SHAPES[args.synthetic]
    return replace(shape, layers=args.layers) if args.layers else shape


def measure_model(
    args: argparse.Namespace,
    probe: StateProbe,
    late: Callable[[], bool],
    keep: Callable[[dict[str, Any]], None],
) -> bool:
    """Check a synthetic model, then time the tests.

    Args:
        args: of `versus_llama_cpp.py`.
        probe: of the machine's state.
        late: whether no further block may begin.
        keep: is given what there is after the check and after every block.

    Returns:
        Whether the model was right; a wrong one is not timed.
    """
    ready = _compiling(args)
    entry: dict[str, Any] = {
        "name": _model_name(args), "options": " ".join(_options(args)),
        "dtype": args.dtype, "check": None, "tests": {},
    }  # fmt: skip
    if args.synthetic and args.check_layers:
        args.activations = "float"  # as gguf_models' own arguments have it
        with tempfile.TemporaryDirectory(dir=folder_for(6 << 30, args.folder)) as folder:
            entry["check"] = check(args, shape_of(args), Path(folder) / "checked.gguf", ready)
        keep(entry)
        if not entry["check"]["right"]:
            return False
        if args.device == "cuda":
            import torch

            torch.cuda.empty_cache()
    with _file(args) as path:
        entry["bytes"] = path.stat().st_size
        entry["file"] = None if args.synthetic else model_record(path)
        theirs = LlamaBench(args, path)
        ours = Ours(args, path)
        ready()
        ours()
        for tests in run_blocks(
            {BASE: theirs, OURS: ours, _CONTROL: theirs}, args.blocks, args.seed, probe, late,
            ours.fault,
        ):  # fmt: skip
            entry |= {"tests": tests, "build": theirs.build, "stepped": ours.stepped}
            keep(entry)
    return True


class LlamaBench:
    """llama-bench, one process a call."""

    def __init__(self, args: argparse.Namespace, path: Path) -> None:
        self._binary, self._path, self._options = (
            args.llama_bin / "llama-bench",
            path,
            _options(args),
        )
        self.build: dict[str, Any] = {}

    def __call__(self) -> dict[str, float]:
        rows = llama_cpp.bench_rows(self._binary, self._path, *self._options)
        self.build = {key: rows[0][key] for key in _BUILD if key in rows[0]}
        return {_test_name(row): float(row["samples_ns"][0]) / 1e3 for row in rows}


class Ours:
    """Our model of the file, loaded once."""

    def __init__(self, args: argparse.Namespace, path: Path) -> None:
        import torch

        import tilewright
        from tilewright.model.bench import BenchTest
        from tilewright.model.generate import decoder_for

        self._model, self._tokenizer = tilewright.load(
            path, device=args.device, dtype=getattr(torch, args.dtype), activations="float"
        )
        self._decoder: Any = decoder_for(self._model)
        self._seed = args.seed
        self._tests = [BenchTest(count, 0) for count in args.prompts]
        self._tests += [BenchTest(0, args.tokens)] if args.tokens else []
        self._kept = self._logits()

    def __call__(self) -> dict[str, float]:
        """Each test is warmed up just before it is timed, as llama-bench does."""
        from tilewright.model.bench import bench

        found = {}
        for test in self._tests:
            (one,) = bench(
                self._model, self._tokenizer, [test], repetitions=1, seed=self._seed,
                decoder=self._decoder,
            )  # fmt: skip
            found[test.name] = one.samples_s[0] * 1e6
        return found

    @property
    def stepped(self) -> str | None:
        from tilewright.model.generate import how_stepped

        return how_stepped(self._model, self._decoder)

    def fault(self) -> str:
        """Why what was timed is not to be trusted; nothing as a rule."""
        import torch

        same = torch.equal(self._kept, self._logits())
        return "" if same else "our logits changed while it was timed"

    def _logits(self) -> Any:
        """After some tokens and a single one more; they must not change from call to call."""
        import torch

        size = self._model.config.get_text_config().vocab_size
        ids = torch.randint(0, size, (1, _KEPT), generator=torch.Generator().manual_seed(7))
        self._decoder.reset()
        self._decoder.prefill(ids[:, :-1])
        return self._decoder.step(int(ids[0, -1])).float().cpu().clone()


def run_blocks(
    arms: dict[str, Arm],
    blocks: int,
    seed: int,
    probe: StateProbe,
    late: Callable[[], bool],
    fault: Callable[[], str],
) -> Iterator[dict[str, Any]]:
    """Every arm once a block, in random position-balanced order; the tests judged so far."""
    taken: dict[str, list[Block]] = {}
    probe.sample()
    for order in block_orders(list(arms), blocks, np.random.default_rng(seed)):
        if late():
            print(f"note: {blocks - len(next(iter(taken.values()), []))} blocks were not reached")
            return
        us = {name: arms[name]() for name in order}
        state = probe.sample()
        for test in us[BASE]:
            times = {name: us[name][test] for name in arms}
            taken.setdefault(test, []).append(Block(order, times, state))
        why = fault()
        print(f"block {len(taken[test])}: " + ", ".join(
            f"{test} {_rate(test, us[BASE][test]):.0f} and {_rate(test, us[OURS][test]):.0f} tok/s"
            for test in taken
        ), flush=True)  # fmt: skip
        yield {test: judged(test, some, why, seed) for test, some in taken.items()}


def judged(test: str, blocks: Sequence[Block], fault: str, seed: int) -> dict[str, Any]:
    """A test's blocks and the judgement of ours; each test is a family of its own."""
    us = {arm: np.array([block.us[arm] for block in blocks]) for arm in (BASE, OURS, _CONTROL)}
    slow = {reason for block in blocks if block.state for reason in block.state.throttle}
    void = [
        *([fault] if fault else []),
        *([f"throttled: {', '.join(sorted(slow))}"] if slow else []),
    ]
    found = judge(us[BASE], us[OURS], us[_CONTROL], seed=seed, void=void)
    return {
        "tokens": int(test[2:]),
        "judgement": Comparison(BASE, OURS, found, ()).to_dict()["judgement"],
        "blocks": [block.to_dict() for block in blocks],
    }


def _compiling(args: argparse.Namespace) -> Callable[[], None]:
    """Begin to compile a synthetic model's kernels; what is returned waits for it."""
    if not args.synthetic or args.device == "cpu":
        return lambda: None
    from warm_models import Warming

    rows = {1, _FEW, min(4096, max([1, *args.prompts]))}
    rows |= {args.check_tokens} if args.check_layers else set()
    rows |= set(args.prompts) if shape_of(args).experts else set()
    return Warming(shape_of(args), sorted(rows), args.dtype, "float").wait


@contextmanager
def _file(args: argparse.Namespace) -> Iterator[Path]:
    """The user's file, or a synthetic one that is gone afterwards."""
    if args.model is not None:
        yield args.model
        return
    shape = shape_of(args)
    folder = folder_for(24 << 30 if shape.experts else 6 << 30, args.folder)
    path = folder / f"tilewright-synthetic-{args.synthetic}-{os.getpid()}.gguf"
    try:
        write_model(path, shape, seed=args.seed, device=args.device)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _model_name(args: argparse.Namespace) -> str:
    if args.model is not None:
        return str(args.model.stem)
    return f"{args.synthetic}, {args.layers} layers" if args.layers else str(args.synthetic)


def _options(args: argparse.Namespace) -> tuple[str, ...]:
    prompts = ",".join(map(str, args.prompts)) or "0"
    return (*OPTIONS, "-p", prompts, "-n", str(args.tokens))


def _test_name(row: dict[str, Any]) -> str:
    return f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"


def _rate(test: str, us: float) -> float:
    return int(test[2:]) / us * 1e6
