"""The GGUF block types that run packed, by name: ``BLOCK_TYPES["Q4_K"]``.

One small class a type, registered once: `blocks_32` (one scale for 32 values), `blocks_k`
(256 values), `blocks_table` (nibbles looked up in a table). Facts of the formats: ggml's
block structures; right values: the dequantizer of the `gguf` package.
"""

from __future__ import annotations

from tilewright.formats import blocks_32, blocks_k, blocks_table  # noqa: F401  fills BLOCK_TYPES
from tilewright.formats.block_type import BLOCK_TYPES, BlockCodes, BlockType
from tilewright.formats.blocks_table import IQ4_TABLE, MXFP4_TABLE

__all__ = ["BLOCK_TYPES", "IQ4_TABLE", "MXFP4_TABLE", "BlockCodes", "BlockType"]
