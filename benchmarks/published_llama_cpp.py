"""What was published of llama.cpp on AMD for GGUF products, mixtures and the Mamba-2 scan, as data.

llama.cpp multiplies GGUF weights by x in 8 bits ("MMQ"), by tiles of J rows of x and I rows of the
weight, and threads of which every wave has 16 rows of the weight; of a mixture J follows the rows
of an expert. Its tables name them for each family of chips, and whether stream-k shares out K.
A study of it on an MI210 (gfx90a) turned stream-k off for all types (12 to 13 % of prefill), then
halved threads and I together (6.5 %), and took chunks of 128 tokens for the scan where llama.cpp
has 256 (2.5 %; of 64, 128, 192, 256 and 512 the fastest). Products of up to 8 rows of x, and of up
to 8 tokens of a mixture, go another way there; so do they here: rows begin above.

The step of K, loads ahead, bands of tiles and the pieces of the scan are this package's own; see
`make_published_tables`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CHIPS",
    "MIXTURES",
    "MIXTURE_TYPES",
    "PRODUCTS",
    "SCANS",
    "Chips",
    "Scan",
    "Step",
]


@dataclass(frozen=True)
class Step:
    """One line of a table: rows of x (J), rows of the weight (I), and waves."""

    rows: int
    block_n: int
    warps: int


@dataclass(frozen=True)
class Chips:
    """What is published for the chips of one table.

    Attributes:
        file: the table's name.
        steps: by J, ascending; a product gets the first whose J holds its rows, else the last.
        stream_k: whether K is shared out evenly among as many programs as there are units.
        note: where the steps come from.
        chunk: tokens of a chunk of the scan; None where none is carried over.
        chunk_note: where that comes from.
    """

    file: str
    steps: tuple[Step, ...]
    stream_k: bool
    note: str
    chunk: int | None = None
    chunk_note: str = ""

    def step(self, rows: int) -> Step:
        """The step for so many rows of x, of one expert in a mixture."""
        return next((step for step in self.steps if rows <= step.rows), self.steps[-1])


_CDNA = tuple(Step(rows, 128, 8) for rows in (16, 32, 64))
_RETUNED = tuple(Step(rows, 64, 4) for rows in (16, 32, 64))
_RDNA3 = (Step(16, 64, 4), Step(32, 64, 4), Step(64, 128, 8))
_RDNA4 = tuple(Step(rows, 64, 4) for rows in (16, 32, 64))
_STUDY = "a study of llama.cpp on an MI210"
_TABLES = "llama.cpp's MMQ table for"
_LOWER = "its J of 80 to 128 is 64 here, the most that this package's tiles have on RDNA"

CHIPS = (
    Chips(
        "gfx90a.json", _RETUNED, False,
        f"{_STUDY}: 64 rows of the weight and 256 threads a tile, J up to 64, stream-k off for all "
        "types; measured there on integer tiles of llama.cpp",
        128, f"{_STUDY}: chunks of 128 tokens, measured there on library products",
    ),
    Chips(
        "gfx942.json", _CDNA, True,
        f"{_TABLES} CDNA: 128 rows of the weight and 512 threads, J up to 64, stream-k",
        128, f"{_STUDY}: chunks of 128 tokens, measured on gfx90a and carried over to gfx942",
    ),
    Chips(
        "gfx1151.json", _RDNA3, False,
        f"{_TABLES} RDNA3.5: 64 rows of the weight and 128 threads for J up to 32, then 128 and "
        f"256, no stream-k; {_LOWER}",
        128, f"{_STUDY}: chunks of 128 tokens, measured on gfx90a and carried over to gfx1151",
    ),
    Chips(
        "gfx11.json", _RDNA3, False,
        f"{_TABLES} RDNA3: 64 rows of the weight and 128 threads for J up to 32, then 128 and 256, "
        f"no stream-k; {_LOWER}",
    ),
    Chips(
        "gfx12.json", _RDNA4, False,
        f"{_TABLES} RDNA4: 64 rows of the weight and 128 threads for J up to 64, no stream-k; "
        f"{_LOWER}",
    ),
)  # fmt: skip

PRODUCTS = ((1024, 2048), (4096, 4096), (28672, 4096), (4096, 14336))
"""(N, K) of rows of products: one of Qwen3-0.6B and three of Llama-3-8B. A step does not depend on
them, so these four stand for all that lie near."""

MIXTURES = ((1536, 2048, 128), (768, 2048, 128), (2048, 768, 128))
"""(N, K, experts) of Qwen3-30B-A3B: gate and up joined, apart, and down."""

MIXTURE_TYPES = ("Q4_K", "Q6_K")
"""What a Q4_K_M file of it holds."""


@dataclass(frozen=True)
class Scan:
    """The Mamba-2 layer of a model: heads of so many channels, and groups that share B and C."""

    heads: int
    channels: int
    state: int
    groups: int


SCANS = (
    Scan(128, 64, 128, 8),  # Nemotron-H-8B, Codestral-Mamba-7B
    Scan(128, 80, 128, 8),  # Nemotron-Nano-9B
    Scan(64, 64, 128, 8),  # Nemotron-3-Nano-30B-A3B
    Scan(80, 64, 128, 1),  # Mamba2-2.7B
    Scan(48, 64, 128, 1),  # Granite-4.0-H-1B
)
