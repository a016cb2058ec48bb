"""llama.cpp's products from its own libraries, in a process that `versus_llama_cpp.py` starts.

Not run by hand. The process loads ggml from the folder it is given, builds the graph that
`test-backend-ops perf` builds, one node launched many times or one node a copy of the weight, and
computes it on request: the blocks, the activations and the ids are those that the other arms get.

Requests and answers are a line of JSON each:

    {"open": {...}}       -> {"bytes": 33030144}    the fields of `Product`; the last one is closed
    {"run": 3}            -> {"us": 16.2}           a launch, over 3 computations of the graph
    {"result": "y.npy"}   -> {"written": "y.npy"}   float32 [outputs, ...], what was computed last
    {"describe": true}    -> {"device": ...}
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Graph", "Library", "LibraryError", "libraries_in"]

_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10,
    "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "I32": 26,
    "MXFP4": 39,
}  # fmt: skip
"""enum ggml_type; those of files are fixed by the GGUF format."""

_NODES = 8192  # room of a graph, as in test-backend-ops
_DEVICES = {"cpu": 0, "gpu": 1}  # enum ggml_backend_dev_type


class LibraryError(Exception):
    """ggml's libraries are missing, or they refused something."""


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


def libraries_in(folder: Path) -> tuple[Path, Path]:
    """libggml-base and libggml of a llama.cpp build, beside its programs or in a `lib` by them.

    Raises:
        LibraryError: they are not there.
    """
    for place in (folder, folder.parent / "lib", folder / "lib"):
        base, whole = (place / f"lib{name}.so" for name in ("ggml-base", "ggml"))
        if base.is_file() and whole.is_file():
            return base, whole
    raise LibraryError(
        f"{folder} holds no libggml-base.so and libggml.so; build llama.cpp with shared libraries "
        "(-DBUILD_SHARED_LIBS=ON), or name the folder of its programs"
    )


def _signatures() -> dict[str, tuple[Any, list[Any]]]:
    """Of the functions used here: what they return and take. Pointers are opaque."""
    ptr = c_void_p
    return {
        "ggml_init": (ptr, [_InitParams]),
        "ggml_free": (None, [ptr]),
        "ggml_tensor_overhead": (c_size_t, []),
        "ggml_graph_overhead_custom": (c_size_t, [c_size_t, c_bool]),
        "ggml_new_tensor": (ptr, [ptr, c_int, c_int, POINTER(c_int64)]),
        "ggml_nbytes": (c_size_t, [ptr]),
        "ggml_mul_mat": (ptr, [ptr, ptr, ptr]),
        "ggml_mul_mat_id": (ptr, [ptr, ptr, ptr, ptr]),
        "ggml_new_graph_custom": (ptr, [ptr, c_size_t, c_bool]),
        "ggml_build_forward_expand": (None, [ptr, ptr]),
        "ggml_graph_add_node": (None, [ptr, ptr]),
        "ggml_graph_n_nodes": (c_int, [ptr]),
        "ggml_backend_alloc_ctx_tensors": (ptr, [ptr, ptr]),
        "ggml_backend_buffer_free": (None, [ptr]),
        "ggml_backend_tensor_set": (None, [ptr, ptr, c_size_t, c_size_t]),
        "ggml_backend_tensor_get": (None, [ptr, ptr, c_size_t, c_size_t]),
        "ggml_backend_graph_compute": (c_int, [ptr, ptr]),
        "ggml_backend_name": (c_char_p, [ptr]),
        "ggml_backend_get_device": (ptr, [ptr]),
        "ggml_backend_dev_description": (c_char_p, [ptr]),
        "ggml_backend_dev_supports_op": (c_bool, [ptr, ptr]),
        "ggml_backend_load_all_from_path": (None, [c_char_p]),
        "ggml_backend_init_by_type": (ptr, [c_int, c_char_p]),
        "ggml_version": (c_char_p, []),
        "ggml_commit": (c_char_p, []),
    }


class Library:
    """ggml's functions and one backend of it.

    Args:
        folder: of llama.cpp's programs.
        device: "gpu", its first one, or "cpu".

    Raises:
        LibraryError: no libraries, none that fit, or no such device.
    """

    def __init__(self, folder: Path, device: str) -> None:
        base, whole = libraries_in(folder)
        try:
            loaded = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in (base, whole)]
        except OSError as error:
            raise LibraryError(f"ggml cannot be loaded: {error}") from error
        for name, (returns, takes) in _signatures().items():
            found = next((getattr(one, name) for one in loaded if hasattr(one, name)), None)
            if found is None:
                raise LibraryError(f"{base.parent} has a ggml without {name}; 0.26 has it")
            found.restype, found.argtypes = returns, takes
            setattr(self, name.removeprefix("ggml_"), found)
        self.backend_load_all_from_path(str(whole.parent).encode())
        self.backend = self.backend_init_by_type(_DEVICES[device], None)
        if not self.backend:
            raise LibraryError(f"this llama.cpp sees no {device}; it was built for other devices")
        self.device = self.backend_get_device(self.backend)
        threads = whole.parent / "libggml-cpu.so"
        if device == "cpu" and threads.is_file():  # they would spin while the other arm runs
            ctypes.CDLL(str(threads)).ggml_backend_cpu_set_n_threads(c_void_p(self.backend), 1)

    def __getattr__(self, name: str) -> Any:  # what __init__ sets, for type checkers
        raise AttributeError(name)

    def describe(self) -> dict[str, str]:
        return {
            "device": self.backend_dev_description(self.device).decode(),
            "backend": self.backend_name(self.backend).decode(),
            "ggml": self.version().decode(),
            "commit": self.commit().decode(),
        }


class Graph:
    """Launches of one product, in one graph.

    Args:
        lib: functions and backend.
        type_name: of the weights' blocks.
        N, K: of the weight, or of each expert.
        raw: path of uint8 [rows, row_bytes] or [experts, N, row_bytes], as np.save writes it.
        repeats: how often `raw` stands in the weight, one after the other.
        x: path of float32 [M, K].
        ids: path of int32 [sets, M, used], which experts each row meets, a set a launch in turn; ""
            for a product with one matrix.
        copies: of the weight; launches go in turn over them.
        launches: of the graph. With one copy and one set of ids it is one node, launched again.
    """

    def __init__(
        self,
        lib: Library,
        *,
        type_name: str,
        N: int,
        K: int,
        raw: str,
        repeats: int,
        x: str,
        ids: str,
        copies: int,
        launches: int,
    ) -> None:
        self._lib, self._launches = lib, launches
        blocks = np.load(raw)
        blocks = np.ascontiguousarray(np.tile(blocks, (repeats, *[1] * (blocks.ndim - 1))))
        rows = np.load(x)
        chosen = np.load(ids) if ids else None
        nodes = 1 if copies == 1 and (chosen is None or len(chosen) == 1) else launches
        self._context = lib.init(_InitParams(_room(lib, copies + 2 * nodes + 2), None, True))
        experts = () if chosen is None else (len(blocks),)
        weights = [self._tensor(type_name, K, N, *experts) for _ in range(copies)]
        # A row of x meets several experts: [K, 1, M] is one row for all of them.
        src = self._tensor("F32", K, *(() if chosen is None else (1,)), len(rows))
        sets = [self._tensor("I32", *one.T.shape) for one in chosen] if chosen is not None else []
        self._shape = (len(rows), N) if chosen is None else (len(rows), chosen.shape[2], N)
        self.outputs = [
            lib.mul_mat(self._context, weights[i % copies], src)
            if chosen is None
            else lib.mul_mat_id(self._context, weights[i % copies], src, sets[i % len(sets)])
            for i in range(nodes)
        ]
        if not lib.backend_dev_supports_op(lib.device, self.outputs[0]):
            raise LibraryError(f"this device does not multiply {type_name}")
        self._buffer = lib.backend_alloc_ctx_tensors(self._context, lib.backend)
        if not self._buffer:
            raise LibraryError(f"no memory for {copies} copies of {blocks.nbytes} bytes")
        for weight in weights:
            self._set(weight, blocks)
        self._set(src, rows)
        for tensor, one in zip(sets, chosen if chosen is not None else (), strict=True):
            self._set(tensor, one)
        self.nbytes = blocks.nbytes
        self._graph = lib.new_graph_custom(self._context, _NODES, False)
        for node in self.outputs:
            lib.build_forward_expand(self._graph, node)
        for _ in range(launches - nodes):
            lib.graph_add_node(self._graph, self.outputs[0])

    def _tensor(self, type_name: str, *sizes: int) -> Any:
        """A tensor; ggml states the fastest dimension first."""
        return self._lib.new_tensor(
            self._context, _TYPES[type_name], len(sizes), (c_int64 * len(sizes))(*sizes)
        )

    def _set(self, tensor: Any, values: np.ndarray[Any, Any]) -> None:
        values = np.ascontiguousarray(values)
        size = self._lib.nbytes(tensor)
        if size != values.nbytes:
            raise LibraryError(f"a tensor of {size} bytes was given {values.nbytes}")
        self._lib.backend_tensor_set(tensor, values.ctypes.data, 0, size)

    def run(self, count: int) -> float:
        """Microseconds a launch, over `count` computations of the graph, each waited for: what
        test-backend-ops times. One more goes before them: the device may have served others."""
        taken_ns = 0
        self._compute()
        for _ in range(count):
            began = time.perf_counter_ns()
            self._compute()
            taken_ns += time.perf_counter_ns() - began
        return taken_ns / 1e3 / count / self._launches

    def _compute(self) -> None:
        status = self._lib.backend_graph_compute(self._lib.backend, self._graph)
        if status:
            raise LibraryError(f"ggml_backend_graph_compute gave status {status}")

    def results(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32 [outputs, M, N], or [outputs, M, used, N]."""
        found = np.empty((len(self.outputs), *self._shape), np.float32)
        for y, node in zip(found, self.outputs, strict=True):
            self._lib.backend_tensor_get(node, y.ctypes.data, 0, y.nbytes)
        return found

    def close(self) -> None:
        self._lib.backend_buffer_free(self._buffer)
        self._lib.free(self._context)


def _room(lib: Library, tensors: int) -> int:
    return int(lib.tensor_overhead() * tensors + lib.graph_overhead_custom(_NODES, False))


class Peer:
    """Answers requests; holds one graph at a time."""

    def __init__(self, lib: Library) -> None:
        self._lib = lib
        self._graph: Graph | None = None

    def open(self, fields: dict[str, Any]) -> dict[str, Any]:
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        self._graph = Graph(self._lib, **fields)
        return {"bytes": self._graph.nbytes}

    def _opened(self) -> Graph:
        if self._graph is None:
            raise LibraryError("nothing is open")
        return self._graph

    def run(self, count: int) -> dict[str, Any]:
        return {"us": self._opened().run(count)}

    def result(self, path: str) -> dict[str, Any]:
        np.save(path, self._opened().results())
        return {"written": path}

    def describe(self, _: bool) -> dict[str, Any]:
        return self._lib.describe()


def main() -> int:
    # ggml may print; only answers may reach the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        peer = Peer(Library(Path(sys.argv[1]), sys.argv[2]))
    except LibraryError as error:
        answer({"error": str(error)})
        return 1
    answer(peer.describe(True))
    handlers: dict[str, Callable[[Any], dict[str, Any]]] = {
        "open": peer.open, "run": peer.run, "result": peer.result, "describe": peer.describe,
    }  # fmt: skip
    for line in sys.stdin:
        ((verb, argument),) = json.loads(line).items()
        try:
            answer(handlers[verb](argument))
        except LibraryError as error:
            answer({"error": str(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
