"""The process behind an arm: opens a model, or an op's products, and answers one request a line.

It runs by its path, `python -P worker.py`, with PYTHONPATH at the source of the revision it is to
measure. So this file imports the package only inside functions, asks it for little, and says what
an older revision lacks.

Requests and answers are JSON, one a line, on standard input and output::

    {"open": {"arm": "A", "model": "m.gguf", "activations": "int8"}}     ->  {"ok": {"source": ...}}
    {"run": {"arm": "A", "test": "pp512", "launches": 1, "readings": 3}}  ->  {"ok": {"us": [...]}}
    {"close": {"arm": "A"}}                                               ->  {"ok": {}}
    anything that fails  ->  {"error": {"kind": "TileError", "message": "...", "exit_code": 1}}

A process may hold several arms, which then share its threads, its environment and, where they
load the same, their model. Between requests it blocks on its input, so that it takes no CPU from
other processes. It ends when its input does.
"""

from __future__ import annotations

import base64
import functools
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = ["ModelArm", "OpsArm", "main", "serve"]

if TYPE_CHECKING:
    from tilewright.model import worker_parts as _parts
else:
    _spec = importlib.util.spec_from_file_location(
        "tilewright_worker_parts", Path(__file__).with_name("worker_parts.py")
    )
    _parts = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_parts)

_LARGE = 1 << 24  # values of an output matrix, which is only ever applied to one row
_MOST_ROWS = 512  # a longer prompt runs the same kernels
_PIECE = 128  # rows of logits written at a time
_MODELS: dict[tuple[str, str, str], tuple[Any, Any]] = {}


class ModelArm:
    """A loaded model and the decoder that steps it.

    Args:
        opening: "model"; and, where given, "device", "activations", "decoder" ("auto", "captured"
            or "transformers"), "table" (path), "rules" (see `matching_rule`), "tests".
    """

    def __init__(self, opening: Mapping[str, Any]) -> None:
        import torch

        from tilewright.model.load import load

        self._torch = torch
        self._activations = opening.get("activations") or "float"
        device = opening.get("device") or "cpu"
        self._key = (str(opening["model"]), self._activations, device)
        if self._key not in _MODELS:
            # An old revision knows no device.
            more: dict[str, Any] = {} if device == "cpu" else {"device": device}
            _MODELS[self._key] = load(opening["model"], activations=self._activations, **more)
        self.model, self.tokenizer = _MODELS[self._key]
        tests = [_parts.parse_test(test) for test in opening.get("tests") or ()]
        prompts = {min(p, _MOST_ROWS) for p, _, _ in tests if p > 1}
        self._batches = sorted({1, *prompts})
        self._state = _parts.TileState(
            opening.get("table"), opening.get("rules") or (), list(self._problems())
        )
        self._state.enter()
        pinned = self._state.algorithms
        self._make = functools.partial(self._make_decoder, opening.get("decoder") or "auto", pinned)
        self._decoder: Any = None
        self._renew()
        self._vocab = self.model.config.get_text_config().vocab_size

    def enter(self) -> None:
        """Make the process this arm's."""
        self._state.enter()

    def close(self, others: Sequence[Any]) -> None:
        """Let go of what no other arm uses."""
        self._state.close()
        if not any(getattr(other, "_key", None) == self._key for other in others):
            _MODELS.pop(self._key, None)

    def _make_decoder(self, kind: str, pinned: set[str]) -> Any:
        from tilewright.model.generate import TransformersDecoder, decoder_for

        if kind not in ("auto", "captured", "transformers"):
            raise ValueError(f"decoder is {kind!r}; give auto, captured or transformers")
        if kind == "transformers":
            return TransformersDecoder(self.model)
        decoder = decoder_for(self.model)
        if type(decoder) is TransformersDecoder and kind == "captured":
            raise ValueError("decoder is 'captured', and this model has no captured programs")
        if isinstance(decoder, TransformersDecoder) or self._key[2] != "cpu":
            return decoder  # a CUDA graph holds whatever was launched
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
        arch = _parts.arch_of_model(self.model)
        for p in model_problems(self.model):
            yield Problem(p.op, arch, dtype, p.type, self._activations, 1, p.N, p.K, p.group)

    def _renew(self) -> None:
        """A new decoder, whose buffers lie elsewhere than those of the one before."""
        self._decoder = None
        self._pad = _parts.padding()
        self._decoder = self._make()

    def describe(self) -> dict[str, Any]:
        return {
            **_parts.about(),
            "decoder": type(self._decoder).__name__,
            "activations": self._activations,
            "vocabulary": self._vocab,
            "tokenizer": self.tokenizer is not None,
            "choices": _parts.chosen_tiles(list(self._problems()), self._batches),
        }

    def run(
        self, test: str, launches: int = 1, readings: int = 1, renew: bool = False, **_: Any
    ) -> dict[str, Any]:
        """Microseconds a launch, one figure a reading; every launch starts at an empty context.

        Args:
            renew: take a new decoder and run the test once untimed before.
        """
        n_prompt, n_gen, depth = _parts.parse_test(test)
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
                at = whole.to(self.model.device)
                out = self.model(input_ids=at, use_cache=False).logits[0]
                for rows in out.split(_PIECE):
                    file.write(rows.float().cpu().numpy().tobytes())
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
        return _parts.verified(report.rows)


class OpsArm:
    """Products of one op, each with its operands and, where given, its tile.

    Args:
        opening: "spec" (a name in the catalog, or file.py:NAME), "cases" (mappings of Case's
            fields); and, where given, "rules", "table", "seed", "threads".
    """

    def __init__(self, opening: Mapping[str, Any]) -> None:
        from tilewright.ops.contract import Case
        from tilewright.tiles.tile import m_bucket

        self._spec = find(opening["spec"])
        self._seed = int(opening.get("seed") or 0)
        self._threads = opening.get("threads")
        self._cases = [Case(**{**c, "flags": tuple(c.get("flags", ()))}) for c in opening["cases"]]
        arch = _parts.arch_of(self._spec)
        self._problems = [case.problem(arch) for case in self._cases]
        rules = opening.get("rules") or ()
        self._state = _parts.TileState(opening.get("table"), (), self._problems)
        self._state.enter()
        _parts.require_products(rules, [(p, m_bucket(p.M)) for p in self._problems])
        self._tiles: list[Any] = []
        for problem in self._problems:
            rule = _parts.matching_rule(rules, problem, m_bucket(problem.M))
            tile = None
            if rule is not None:
                space = self._spec.space() if self._spec.space else None
                tile = _parts.rule_tile(rules[rule], space)
                if space is not None:
                    space.check(tile, problem)
            self._tiles.append(tile)
        self._inputs: dict[int, Any] = {}
        self._last: dict[int, Any] = {}
        self._flush: Callable[[], Any] | None = None

    def enter(self) -> None:
        """Make the process this arm's."""
        self._state.enter()

    def close(self, others: Sequence[Any]) -> None:
        """Let go of what this arm has written."""
        self._state.close()

    def describe(self) -> dict[str, Any]:
        return {**_parts.about(), "tiles": [None if t is None else str(t) for t in self._tiles]}

    def _at(self, test: str) -> int:
        for index, case in enumerate(self._cases):
            if case.id == test:
                return index
        raise ValueError(f"test is {test!r}; this arm has {[case.id for case in self._cases]}")

    def _operands(self, index: int) -> Any:
        """The operands of a case, watched for the check after timing."""
        if index not in self._inputs:
            inputs = self._spec.make_inputs(self._cases[index], self._seed)
            try:
                from tilewright.tune.gate import watch
            except ImportError:
                pass  # a revision without a gate: results are held to the oracle all the same
            else:
                watch(inputs)
            self._inputs[index] = inputs
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
            self._pad = _parts.padding()
            inputs = self._operands(index)
            self._spec.run(inputs, tile=self._tiles[index], threads=self._threads)
        inputs, tile, run = self._operands(index), self._tiles[index], self._spec.run
        device = inputs.x.device
        if cold and self._flush is None:
            self._flush = _parts.flusher_of(device)
        timer = _parts.timer_of(device)

        def launch() -> None:
            self._last[index] = run(inputs, tile=tile, threads=self._threads)

        def reading() -> float:
            if not cold:
                return timer(launch, launches)
            total = 0.0
            for _launch in range(launches):
                assert self._flush is not None
                self._flush()
                total += timer(launch, 1)
            return total

        return {"us": [reading() / launches for _ in range(readings)]}

    def verify(self, seed: int = 0) -> dict[str, Any]:
        """Every case with its tile, by the gate; by its oracle in a revision without one."""
        try:
            from tilewright.tune.gate import gate
        except ImportError:
            return self._verify_by_oracle(seed)
        failures = []
        for case, tile in zip(self._cases, self._tiles, strict=True):
            result = gate(self._spec, tile, [case], seed=seed, threads=self._threads)
            if not result.passed:
                failures.append(f"{case.id}: {result}")
        return {"rows": len(self._cases), "failures": failures}

    def _verify_by_oracle(self, seed: int) -> dict[str, Any]:
        from tilewright.tune.verify import verify_op

        rows: list[Any] = []
        for case, tile in zip(self._cases, self._tiles, strict=True):
            rows += verify_op(
                self._spec, seed=seed, cases=[case], tiles=None if tile is None else [tile],
                threads=self._threads,
            ).rows  # fmt: skip
        return _parts.verified(rows)

    def recheck(self) -> dict[str, Any]:
        """Hold the results of the last timed launches to the oracle."""
        faults = [fault for index, y in self._last.items() if (fault := self._fault(index, y))]
        rows = len(self._last)
        self._last.clear()
        return {"rows": rows, "failures": faults}

    def _fault(self, index: int, y: Any) -> str:
        inputs, name = self._operands(index), self._cases[index].id
        try:
            from tilewright.tune.gate import recheck
        except ImportError:
            from tilewright.ops.check import check_output

            ref = self._spec.reference(inputs)
            checked = check_output(y, ref, self._spec.error_model(inputs, ref))
            return "" if checked.passed else f"{name}: {checked.reason}"
        tile, threads = self._tiles[index], self._threads
        result = recheck(self._spec, inputs, y, tile=tile, threads=threads)
        return "" if result.passed else f"{name}: {result}"


def find(spec: str) -> Any:
    """An op of the catalog by name, or of a user's file by file.py:NAME."""
    from tilewright.ops import catalog

    if hasattr(catalog, "load_spec"):
        return catalog.load_spec(spec)
    if ":" in spec:
        raise ValueError(f"spec is {spec!r}; this revision reads no spec files")
    return catalog.find_spec(spec)


class _Server:
    """The arms of this process by name."""

    def __init__(self) -> None:
        self._arms: dict[str, Any] = {}

    def __call__(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked and return the answer.

        Raises:
            ValueError: there is no such arm, or it does not know the verb.
        """
        name = arguments.pop("arm")
        if verb == "open":
            if "threads" in arguments:
                _set_threads(arguments["threads"])
            arm = (ModelArm if "model" in arguments else OpsArm)(arguments)
            self._arms[name] = arm
            # What an arm is made of lives as long as the arm: the collector need not walk it again.
            gc.collect()
            gc.freeze()
            return arm.describe()
        if name not in self._arms:
            raise ValueError(f"there is no arm {name!r}; open are {list(self._arms)}")
        if verb == "close":
            arm = self._arms.pop(name)
            arm.close(list(self._arms.values()))
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            return {}
        arm = self._arms[name]
        if verb.startswith("_") or not hasattr(arm, verb):
            raise ValueError(f"request {verb!r}: arm {name!r} does not know it")
        arm.enter()
        gc.collect()
        gc.disable()
        try:
            answer: dict[str, Any] = getattr(arm, verb)(**arguments)
            return answer
        finally:
            gc.enable()

    def close(self) -> None:
        for arm in self._arms.values():
            arm.close(())


def _set_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def serve(requests: Iterator[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer requests until they end; an error is the answer to the request that met it."""
    server = _Server()
    try:
        for line in requests:
            ((verb, arguments),) = json.loads(line).items()
            try:
                answer({"ok": server(verb, arguments)})
            except Exception as error:  # every kind is the asker's to judge
                kind, code = type(error).__name__, getattr(error, "exit_code", None)
                answer({"error": {"kind": kind, "message": str(error), "exit_code": code}})
    finally:
        server.close()


def main() -> None:
    """Serve standard input; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    serve(iter(sys.stdin), answer)


if __name__ == "__main__":
    main()
