"""onnxruntime's MatMulNBits as an algorithm: 4-bit weights in blocks of a power of two.

One model with one node, and one session, a weight. The session keeps a copy of the weight in its
own layout, so this algorithm costs the weight's bytes a second time.

Q4_0 is its symmetric form (zero 8). Q4_1 has a float minimum that it cannot hold:

    sum over blocks of (d q + m) x = sum d (q - 8) x + sum (m + 8 d) * sum(x over the block)

so a second, small product over block sums completes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.cpu import PART, PackedBlocks
from tilewright.ops.cpu.launch import CpuWeight, _rows_of

__all__ = ["launch_onnxruntime"]

_BLOCK = 32


def _natural_codes(weight: CpuWeight) -> np.ndarray:
    """Codes 0..15 as uint8 [N, K]."""
    packed = weight.keep
    if isinstance(packed, PackedBlocks):
        kind = BLOCK_TYPES[packed.type_name]
        raw = packed.data.numpy().reshape(weight.N, -1, kind.block_bytes)
        halves = raw[:, :, kind.block_bytes - 16 :]
    else:
        halves = packed.codes.numpy().reshape(weight.N, -1, 16)
    codes = np.concatenate([halves & 15, halves >> 4], axis=2)
    return np.asarray(codes.reshape(weight.N, weight.parts * PART)[:, : weight.K])


def _scales(weight: CpuWeight) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, int]:
    """Scales [N, blocks], zero points or None, the rest that a second product adds, block size."""
    packed = weight.keep
    if isinstance(packed, PackedBlocks):
        raw = packed.data.numpy()
        codes = BLOCK_TYPES[packed.type_name].codes(raw)
        scale = np.ascontiguousarray(codes.scale, dtype=np.float32)
        rest = None
        if codes.minimum is not None:
            rest = (codes.minimum + np.float32(8.0) * scale).astype(np.float32)
        return scale, None, rest, _BLOCK
    zeros = None if packed.zeros is None else packed.zeros.numpy()
    return packed.scales.numpy(), zeros, None, packed.group_size


def _session(weight: CpuWeight, level: int, threads: int) -> tuple[Any, torch.Tensor | None]:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    n, k = weight.N, weight.K
    scale, zeros, rest, block = _scales(weight)
    codes = _natural_codes(weight).reshape(n, k // block, block // 2, 2)
    packed = np.ascontiguousarray(codes[..., 0] | (codes[..., 1] << 4))
    tensors = [
        numpy_helper.from_array(packed, "w"),
        numpy_helper.from_array(np.ascontiguousarray(scale).reshape(-1), "s"),
    ]
    if zeros is not None:
        groups = zeros.shape[1]
        even = np.pad(zeros, ((0, 0), (0, groups % 2)))
        both = np.ascontiguousarray(even[:, ::2] | (even[:, 1::2] << 4))
        tensors.append(numpy_helper.from_array(both.reshape(-1), "z"))
    node = helper.make_node(
        "MatMulNBits", ["x", *(t.name for t in tensors)], ["y"], domain="com.microsoft",
        K=k, N=n, bits=4, block_size=block, accuracy_level=level,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "matmul",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", n])],
        tensors,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session, None if rest is None else torch.from_numpy(rest)


def launch_onnxruntime(
    x: torch.Tensor, weight: CpuWeight, y: torch.Tensor, level: int, threads: int
) -> None:
    """y = x @ W.T through MatMulNBits at accuracy `level` (0 float32, 4 8-bit activations)."""
    key = ("onnxruntime", level, threads)
    if key not in weight.library:
        weight.library[key] = _session(weight, level, threads)
    session, rest = weight.library[key]
    xs = _rows_of(x, x.shape[0], weight.parts * PART)[: x.shape[0], : weight.K].contiguous()
    binding = session.io_binding()
    for name, tensor, bind in (("x", xs, binding.bind_input), ("y", y, binding.bind_output)):
        bind(name, "cpu", 0, np.float32, list(tensor.shape), tensor.data_ptr())
    session.run_with_iobinding(binding)
    if rest is not None:
        y += xs.view(x.shape[0], -1, _BLOCK).sum(-1) @ rest.T
