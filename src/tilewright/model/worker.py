"""The process behind an arm: opens a model, or an op's products, and answers one request a line.

It runs by its path, `python -P worker.py`, with PYTHONPATH at the source of the revision it is to
measure. So this file imports the package only inside functions, asks it for little, and says what
an older revision lacks.

Requests and answers are JSON, one a line, on standard input and output::

    {"open": {"model": "m.gguf", "activations": "int8", "threads": 2}}  ->  {"ok": {"source": ...}}
    {"run": {"test": "pp512", "launches": 1, "readings": 3}}            ->  {"ok": {"us": [...]}}
    anything that fails  ->  {"error": {"kind": "TileError", "message": "...", "exit_code": 1}}

Between requests the process blocks on its input, so that it takes no CPU from the other arms.
It ends when its input does.
"""

from __future__ import annotations

import base64
import fnmatch
import functools
import gc
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ModelArm", "OpsArm", "main", "matching_rule", "parse_test", "serve"]

_TEST = re.compile(r"(?:pp(\d+))?\+?(?:tg(\d+))?(?: ?@ ?d(\d+))?")
_LARGE = 1 << 24  # values of an output matrix, which is only ever applied to one row
_MOST_ROWS = 512  # a longer prompt runs the same kernels
_PIECE = 128  # rows of logits written at a time


def parse_test(test: str) -> tuple[int, int, int]:
    """Prompt tokens, generated tokens and depth of "pp512", "tg32", "pp512+tg32 @ d1024".

    Raises:
        ValueError: it is none of these.
    """
    match = _TEST.fullmatch(test.strip())
    counts = tuple(int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    if counts[0] + counts[1] == 0:
        raise ValueError(f"test is {test!r}; give pp<n>, tg<n> or pp<n>+tg<n>, with @ d<n> after")
    return counts[0], counts[1], counts[2]


def matching_rule(rules: Sequence[Mapping[str, Any]], problem: Any, m: int) -> int | None:
    """Index of the last rule that names this product at this bucket of M; None if none does.

    A rule is {"op", "type", "m": [low, high or null], "n", "k", "tile"}; what it leaves out
    matches everything, and op and type may hold * and ?.
    """
    for index in range(len(rules) - 1, -1, -1):
        rule = rules[index]
        low, high = rule.get("m") or (1, None)
        if (
            fnmatch.fnmatchcase(problem.op, rule.get("op") or "*")
            and fnmatch.fnmatchcase(problem.weight_type, rule.get("type") or "*")
            and low <= m <= (high or m)
            and rule.get("n") in (None, problem.N)
            and rule.get("k") in (None, problem.K)
        ):
            return index
    return None


class ModelArm:
    """A loaded model and the decoder that steps it.

    Args:
        opening: "model"; and, where given, "activations", "decoder" ("auto", "captured" or
            "transformers"), "threads", "table" (path), "rules" (see `matching_rule`), "tests".
    """

    def __init__(self, opening: Mapping[str, Any]) -> None:
        import torch

        from tilewright.model.load import load

        _set_threads(opening)
        self._torch = torch
        self._activations = opening.get("activations") or "float"
        self.model, self.tokenizer = load(opening["model"], activations=self._activations)
        tests = [parse_test(test) for test in opening.get("tests") or ()]
        prompts = {min(p, _MOST_ROWS) for p, _, _ in tests if p > 1}
        self._batches = sorted({1, *prompts})
        if opening.get("table"):
            use_table(opening["table"], _arch())
        pinned = set()
        if opening.get("rules"):
            pinned = pin_tiles(list(self._problems()), opening["rules"])
        self._make = functools.partial(self._make_decoder, opening.get("decoder") or "auto", pinned)
        self._decoder: Any = None
        self._renew()
        self._vocab = self.model.config.get_text_config().vocab_size

    def _make_decoder(self, kind: str, pinned: set[str]) -> Any:
        from tilewright.model.generate import TransformersDecoder, decoder_for

        if kind not in ("auto", "captured", "transformers"):
            raise ValueError(f"decoder is {kind!r}; give auto, captured or transformers")
        if kind == "transformers":
            return TransformersDecoder(self.model)
        decoder = decoder_for(self.model)
        if isinstance(decoder, TransformersDecoder):
            if kind == "captured":
                raise ValueError("decoder is 'captured', and this model has no captured programs")
            return decoder
        from tilewright.model import fuse

        libraries = sorted(pinned - set(getattr(fuse, "CAPTURED", pinned)))
        if libraries:
            raise ValueError(
                f"a captured program cannot hold the algorithms {libraries} that the tiles name; "
                "set decoder to transformers for all change sets"
            )
        return decoder

    def _problems(self) -> Iterator[Any]:
        from tilewright.model.layers import model_problems
        from tilewright.tiles.tile import Problem

        dtype = str(self.model.dtype).removeprefix("torch.")
        for p in model_problems(self.model):
            yield Problem(p.op, _arch(), dtype, p.type, self._activations, 1, p.N, p.K, p.group)

    def _renew(self) -> None:
        """A new decoder, whose buffers lie elsewhere than those of the one before."""
        self._decoder = None
        self._pad = _padding()
        self._decoder = self._make()

    def describe(self) -> dict[str, Any]:
        return {
            **_about(),
            "decoder": type(self._decoder).__name__,
            "activations": self._activations,
            "vocabulary": self._vocab,
            "tokenizer": self.tokenizer is not None,
            "choices": chosen_tiles(list(self._problems()), self._batches),
        }

    def run(
        self, test: str, launches: int = 1, readings: int = 1, renew: bool = False, **_: Any
    ) -> dict[str, Any]:
        """Microseconds a launch, one figure a reading; every launch starts at an empty context.

        Args:
            renew: take a new decoder and run the test once untimed before.
        """
        n_prompt, n_gen, depth = parse_test(test)
        generator = self._torch.Generator().manual_seed(0)
        ids = self._torch.randint(
            0, self._vocab, (1, depth + n_prompt + n_gen), generator=generator
        )
        before, prompt, steps = ids.split([depth, n_prompt, n_gen], dim=1)
        step_ids = steps[0].tolist()

        def once() -> float:
            self._decoder.reset()
            if depth:
                self._decoder.prefill(before)
            start = time.perf_counter_ns()
            if n_prompt:
                self._decoder.prefill(prompt)
            for token in step_ids:
                self._decoder.step(token)
            return (time.perf_counter_ns() - start) / 1e3

        if renew:
            self._renew()
            once()
        return {"us": [sum(once() for _ in range(launches)) / launches for _ in range(readings)]}

    def tokens(self, texts: Sequence[str]) -> dict[str, Any]:
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer, so its texts cannot be compared")
        return {"ids": [list(self.tokenizer(text)["input_ids"]) for text in texts]}

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        """`count` ids after each prompt, always the largest logit, never stopping early."""
        made = []
        for prompt in prompts:
            self._decoder.reset()
            logits = self._decoder.prefill(self._torch.tensor([list(prompt)]))
            ids = [int(logits.argmax())]
            while len(ids) < count:
                ids.append(int(self._decoder.step(ids[-1]).argmax()))
            made.append(ids)
        return {"ids": made}

    def last(self, ids: Sequence[int]) -> dict[str, Any]:
        """Logits after the last of `ids`, float32 in base64."""
        self._decoder.reset()
        logits = self._decoder.prefill(self._torch.tensor([list(ids)])).float().contiguous()
        return {"logits": base64.b64encode(logits.numpy().tobytes()).decode()}

    def logits(self, ids: Sequence[int], path: str) -> dict[str, Any]:
        """Write the logits after each of `ids` to `path`: float32 [T, V], raw."""
        whole = self._torch.tensor([list(ids)])
        with open(path, "wb") as file, self._torch.inference_mode():
            self._decoder.reset()
            if hasattr(self._decoder, "logits"):
                for piece in whole.split(_PIECE, dim=1):
                    file.write(self._decoder.logits(piece).float().numpy().tobytes())
            else:
                out = self.model(input_ids=whole, use_cache=False).logits[0]
                for rows in out.split(_PIECE):
                    file.write(rows.float().numpy().tobytes())
        return {"shape": [len(ids), self._vocab]}

    def verify(self, seed: int = 0) -> dict[str, Any]:
        """Every distinct product of the model, through the tiles it runs with, by the oracle."""
        from tilewright.model.check import model_cases, verify_cases

        cases = {
            op: [c for c in some if c.M == 1 or c.N * c.K <= _LARGE]
            for op, some in model_cases(
                self.model, paths=[self._activations], batches=self._batches
            ).items()
        }
        report = verify_cases(cases, seed=seed)
        return _verified(report.rows)


class OpsArm:
    """Products of one op, each with its operands and, where given, its tile.

    Args:
        opening: "spec" (a name in the catalog, or file.py:NAME), "cases" (mappings of Case's
            fields); and, where given, "rules", "table", "seed", "threads".
    """

    def __init__(self, opening: Mapping[str, Any]) -> None:
        from tilewright.ops.contract import Case
        from tilewright.tiles.tile import Tile, m_bucket

        _set_threads(opening)
        self._spec = find(opening["spec"])
        self._seed = int(opening.get("seed") or 0)
        self._threads = opening.get("threads")
        self._cases = [Case(**{**c, "flags": tuple(c.get("flags", ()))}) for c in opening["cases"]]
        self._problems = [case.problem(_arch()) for case in self._cases]
        rules = opening.get("rules") or ()
        if opening.get("table"):
            use_table(opening["table"], _arch())
        self._tiles: list[Any] = []
        used = set()
        for problem in self._problems:
            rule = matching_rule(rules, problem, m_bucket(problem.M))
            tile = None
            if rule is not None:
                used.add(rule)
                tile = Tile.from_mapping(rules[rule]["tile"])
                space = self._spec.space() if self._spec.space else None
                if space is not None:
                    space.check(tile, problem)
            self._tiles.append(tile)
        _all_used(rules, used)
        self._inputs: dict[int, Any] = {}
        self._last: dict[int, Any] = {}
        self._flush: Callable[[], Any] | None = None

    def describe(self) -> dict[str, Any]:
        return {**_about(), "tiles": [None if t is None else str(t) for t in self._tiles]}

    def _at(self, test: str) -> int:
        for index, case in enumerate(self._cases):
            if case.id == test:
                return index
        raise ValueError(f"test is {test!r}; this arm has {[case.id for case in self._cases]}")

    def _operands(self, index: int) -> Any:
        if index not in self._inputs:
            self._inputs[index] = self._spec.make_inputs(self._cases[index], self._seed)
        return self._inputs[index]

    def run(
        self,
        test: str,
        launches: int = 1,
        readings: int = 1,
        cold: bool = False,
        renew: bool = False,
        **_: Any,
    ) -> dict[str, Any]:
        """Microseconds a launch, one figure a reading.

        Args:
            cold: flush twice the last-level cache before each launch, untimed.
            renew: draw the operands anew, elsewhere in memory, and launch once untimed before.
        """
        index = self._at(test)
        if renew:
            self._inputs.pop(index, None)
            self._pad = _padding()
            inputs = self._operands(index)
            self._spec.run(inputs, tile=self._tiles[index], threads=self._threads)
        inputs, tile, run = self._operands(index), self._tiles[index], self._spec.run
        if cold and self._flush is None:
            from tilewright.measure import CpuFlusher

            self._flush = CpuFlusher()
        us = []
        for _reading in range(readings):
            total = 0
            if cold:
                assert self._flush is not None
                for _launch in range(launches):
                    self._flush()
                    start = time.perf_counter_ns()
                    y = run(inputs, tile=tile, threads=self._threads)
                    total += time.perf_counter_ns() - start
            else:
                start = time.perf_counter_ns()
                for _launch in range(launches):
                    y = run(inputs, tile=tile, threads=self._threads)
                total = time.perf_counter_ns() - start
            us.append(total / launches / 1e3)
        self._last[index] = y
        return {"us": us}

    def verify(self, seed: int = 0) -> dict[str, Any]:
        """Every case with its tile, by the oracle."""
        from tilewright.tune.verify import verify_op

        rows: list[Any] = []
        for case, tile in zip(self._cases, self._tiles, strict=True):
            rows += verify_op(
                self._spec, seed=seed, cases=[case], tiles=None if tile is None else [tile],
                threads=self._threads,
            ).rows  # fmt: skip
        return _verified(rows)

    def recheck(self) -> dict[str, Any]:
        """Hold the results of the last timed launches to the oracle."""
        from tilewright.ops.check import check_output

        faults = []
        for index, y in self._last.items():
            inputs = self._operands(index)
            ref = self._spec.reference(inputs)
            result = check_output(y, ref, self._spec.error_model(inputs, ref))
            if not result.passed:
                faults.append(f"{self._cases[index].id}: {result.reason}")
        return {"rows": len(self._last), "failures": faults}


def find(spec: str) -> Any:
    """An op of the catalog by name, or of a user's file by file.py:NAME."""
    from tilewright.ops import catalog

    if ":" in spec:
        if not hasattr(catalog, "load_spec"):
            raise ValueError(f"spec is {spec!r}; this revision reads no spec files")
        return catalog.load_spec(spec)
    return catalog.find_spec(spec)


def use_table(path: str, arch: str) -> None:
    """Make every lookup of this process read the table at `path` before any other.

    Raises:
        ValueError: this revision has no tile tables.
        TileError: the file is no table.
    """
    tables = _tables()
    tables.load_table(path)
    folder = Path(tempfile.mkdtemp(prefix="tilewright-tiles-"))
    _FOLDERS.append(folder)
    shutil.copyfile(path, folder / f"{arch}.json")
    os.environ[tables.FOLDER_VARIABLE] = str(folder)
    tables.forget()


def pin_tiles(problems: Sequence[Any], rules: Sequence[Mapping[str, Any]]) -> set[str]:
    """Make every lookup of this process answer with the rules' tiles where a rule matches.

    Returns:
        The algorithms that were pinned.

    Raises:
        ValueError: this revision has no lookup, or a rule decides about no product.
        TileError: a rule's tile may not run a product it matches.
    """
    import torch

    from tilewright.ops.catalog import find_spec
    from tilewright.tiles.tile import Problem, Tile, m_bucket

    tables = _tables()
    used, algorithms = set(), set()
    for problem in problems:
        space = find_spec(problem.op).space()  # type: ignore[misc]
        for m in sorted({m_bucket(2**i) for i in range(20)}):
            index = matching_rule(rules, problem, m)
            if index is None:
                continue
            used.add(index)
            at = Problem(**{**problem.__dict__, "M": m})
            tile = Tile.from_mapping(rules[index]["tile"])
            space.check(tile, at)
            algorithms.add(tile.algorithm)
            choice = tables.Choice(tile, "pinned", None, "set by the change set")
            tables._CHOICES[at, space.name, torch.get_num_threads()] = choice
    _all_used(rules, used)
    return algorithms


def chosen_tiles(problems: Sequence[Any], batches: Sequence[int]) -> list[dict[str, Any]]:
    """What `lookup` gives each product at each M; empty in a revision without tables."""
    try:
        from tilewright.ops.choose import choose_tile
    except ImportError:
        return []
    from tilewright.ops.catalog import find_spec
    from tilewright.tiles.tile import Problem

    chosen = []
    for problem in problems:
        for m in batches:
            at = Problem(**{**problem.__dict__, "M": m})
            choice = choose_tile(at, find_spec(problem.op).space())  # type: ignore[misc]
            row = {name: getattr(at, name) for name in ("op", "weight_type", "M", "N", "K")}
            chosen.append({**row, "tile": str(choice.tile), "how": choice.how, "note": choice.note})
    return chosen


def _tables() -> Any:
    try:
        from tilewright.tiles import table
    except ImportError as error:
        raise ValueError("this revision has no tile tables; leave table and tiles out") from error
    return table


def _all_used(rules: Sequence[Mapping[str, Any]], used: set[int]) -> None:
    for index, rule in enumerate(rules):
        if index not in used:
            raise ValueError(
                f"tiles[{index}] {json.dumps(rule)} names no product of this arm, or a later one "
                "replaces it everywhere; correct its op, type or m"
            )


def _verified(rows: Sequence[Any]) -> dict[str, Any]:
    failures = [
        f"{row.label} {row.case}" + (f", tile {row.tile}" if row.tile else "") + f": {row.reason}"
        for row in rows
        if not row.passed
    ]
    return {"rows": len(rows), "failures": failures}


def _arch() -> str:
    from tilewright.device import cpu_device

    return cpu_device().arch


_FOLDERS: list[Path] = []


def _set_threads(opening: Mapping[str, Any]) -> None:
    import torch

    if opening.get("threads"):
        torch.set_num_threads(int(opening["threads"]))


def _padding() -> Any:
    """Memory of a random size: what is allocated while it is held lies elsewhere than before."""
    import torch

    return torch.empty(random.randrange(1 << 20), dtype=torch.uint8)


def _about() -> dict[str, Any]:
    import torch

    from tilewright import __version__

    return {
        "source": str(Path(str(sys.modules["tilewright"].__file__)).parent),
        "version": __version__,
        "threads": torch.get_num_threads(),
    }


def serve(requests: Iterator[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer requests until they end."""
    arm: Any = None
    for line in requests:
        ((verb, arguments),) = json.loads(line).items()
        try:
            if verb == "open":
                arm = (ModelArm if "model" in arguments else OpsArm)(arguments)
                answer({"ok": arm.describe()})
                continue
            if arm is None or verb.startswith("_") or not hasattr(arm, verb):
                raise ValueError(f"request {verb!r}: this arm does not know it")
            gc.collect()
            gc.disable()
            try:
                answer({"ok": getattr(arm, verb)(**arguments)})
            finally:
                gc.enable()
        except Exception as error:  # every failure belongs to the one who asked
            answer(
                {
                    "error": {
                        "kind": type(error).__name__,
                        "message": str(error),
                        "exit_code": getattr(error, "exit_code", None),
                    }
                }
            )


def main() -> None:
    """Serve standard input; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        serve(iter(sys.stdin), answer)
    finally:
        for folder in _FOLDERS:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
