"""One engine in a process of its own: reads a request a line, answers a line, sleeps between.

Not run by hand; `arms.py` starts it. Requests and answers are JSON:

    {"run": "pp512"}      -> {"us": 1023456.7}       time of that test
    {"logits": [1, 2]}    -> {"logits": "base64"}    float32 logits after the last id
    {"describe": true}    -> {...}                   what runs here
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=["float", "int8", "transformers"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    # Libraries may print; only answers may reach the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    engine = Engine(args.engine, args.model, args.threads)
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    handlers: dict[str, Callable[[Any], Any]] = {
        "run": engine.run,
        "logits": engine.logits,
        "describe": engine.describe,
    }
    for line in sys.stdin:
        ((verb, argument),) = json.loads(line).items()
        answers.write(json.dumps(handlers[verb](argument)) + "\n")
        answers.flush()


class Engine:
    """A loaded model and what steps it."""

    def __init__(self, engine: str, path: Path, threads: int) -> None:
        import torch

        from tilewright.model.generate import TransformersDecoder, decoder_for

        torch.set_num_threads(threads)
        torch.set_num_interop_threads(1)
        self._engine = engine
        if engine == "transformers":
            from reference import load_reference

            model, _ = load_reference(path)
            self._decoder: Any = TransformersDecoder(model)
        else:
            import tilewright

            model, _ = tilewright.load(path, activations=engine)
            self._decoder = decoder_for(model)
        self._vocab = model.config.get_text_config().vocab_size
        self._ids = torch.Generator().manual_seed(0)
        self._torch = torch

    def run(self, test: str) -> dict[str, float]:
        """Time `pp<n>`, the prefill of n random tokens, or `tg<n>`, n single-token steps."""
        kind, count = re.fullmatch(r"(pp|tg)(\d+)", test).groups()  # type: ignore[union-attr]
        ids = self._torch.randint(0, self._vocab, (1, int(count)), generator=self._ids)
        steps = ids[0].tolist()
        self._decoder.reset()
        start = time.perf_counter_ns()
        if kind == "pp":
            self._decoder.prefill(ids)
        else:
            for token in steps:
                self._decoder.step(token)
        return {"us": (time.perf_counter_ns() - start) / 1e3}

    def logits(self, ids: list[int]) -> dict[str, str]:
        self._decoder.reset()
        logits = self._decoder.prefill(self._torch.tensor([ids]))
        self._decoder.reset()
        return {"logits": base64.b64encode(logits.float().numpy().tobytes()).decode()}

    def describe(self, _: Any) -> dict[str, Any]:
        packages = ["torch", "transformers", "numba", "tilewright"]
        if self._engine == "transformers":
            packages = ["torch", "transformers"]
        return {
            "engine": self._engine,
            "decoder": type(self._decoder).__name__,
            "threads": self._torch.get_num_threads(),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "versions": {name: _version(name) for name in packages},
        }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(__import__(package).__version__)


if __name__ == "__main__":
    main()
