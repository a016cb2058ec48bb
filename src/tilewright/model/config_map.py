"""From a checkpoint's own description to a transformers configuration.

GGUF metadata names fields in llama.cpp's words (`llama.attention.head_count`); a transformers
configuration needs the same facts plus a few that llama.cpp keeps in its code: gemma3's rope base
of the sliding layers, its attention scale, its pattern of sliding and full layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.errors import FormatError, UnsupportedError
from tilewright.model.hybrid_config import HYBRIDS, hybrid_options

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = [
    "ARCHITECTURES",
    "MODEL_TYPES",
    "config_from_checkpoint",
    "config_from_gguf",
]

# GGUF architecture or transformers model type -> configuration class.
_CLASSES = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3moe": "Qwen3MoeConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "gemma3": "Gemma3TextConfig",
    "gemma3_text": "Gemma3TextConfig",
    "mamba2": "Mamba2Config",
    "nemotron_h": "NemotronHConfig",
    "bamba": "BambaConfig",
    "granitehybrid": "GraniteMoeHybridConfig",
    "granitemoehybrid": "GraniteMoeHybridConfig",
    "falcon-h1": "FalconH1Config",
    "falcon_h1": "FalconH1Config",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", *HYBRIDS)
"""The GGUF architectures that load."""

MODEL_TYPES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "gemma3", "gemma3_text",
    "mamba2", "nemotron_h", "bamba", "granitemoehybrid", "falcon_h1",
)  # fmt: skip
"""The model types of a config.json that load."""

_MIXTURES = ("qwen3moe",)

_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_PATTERN = 6
_GEMMA_27B_LAYERS = 62


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    tied: bool,
    biases: frozenset[str],
    file: object,
    stems: frozenset[str] = frozenset(),
) -> PreTrainedConfig:
    """Configuration of a GGUF file of one of `ARCHITECTURES`.

    Args:
        metadata: the file's key-value pairs.
        vocab_size: rows of the token embedding.
        tied: True if the file has no output matrix of its own.
        biases: stems of the block tensors that have a bias, such as "attn_q", "ffn_up".
        file: path of the file, for messages.
        stems: stems of all block tensors, by which hybrid variants are told apart.

    Raises:
        UnsupportedError: another architecture, or a variant of it that transformers' model
            class does not compute.
        FormatError: a field is missing or malformed.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file}: general.architecture is {architecture!r}; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    fields = _Fields(metadata, architecture, file)
    if architecture in HYBRIDS:
        options = hybrid_options(
            fields, architecture, vocab_size=vocab_size, tied=tied, biases=biases, stems=stems
        )
        return _made(architecture, options, file, "its metadata make")
    fields.refuse_variants()
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(
            f"{file}: keys of {head_dim} and values of "
            f"{fields.integer('attention.value_length', head_dim)} numbers a head; they must agree"
        )
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedError(
            f"{file}: rope turns {fields.integer('rope.dimension_count', head_dim)} of {head_dim} "
            f"numbers of a head; {architecture} models in transformers turn all of them"
        )
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": fields.integer(
            "feed_forward_length", fields.expert_width() if architecture in _MIXTURES else None
        ),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": tied,
        "use_cache": True,
    }
    if architecture == "llama":
        common["attention_bias"] = any(stem.startswith("attn_") for stem in biases)
        common["mlp_bias"] = any(stem.startswith("ffn_") for stem in biases)
    if architecture in _MIXTURES:
        common |= _mixture_fields(fields)
    if architecture == "gemma3":
        common |= _gemma_fields(fields, common)
    else:
        common["rope_parameters"] = fields.rope(10_000.0)
    if architecture == "qwen2" and head_dim != hidden // heads:
        raise UnsupportedError(f"{file}: qwen2 with head size {head_dim} for {hidden}/{heads}")
    return _made(architecture, common, file, "its metadata make")


def _made(kind: str, options: Mapping[str, Any], file: object, what: str) -> PreTrainedConfig:
    import transformers

    made = getattr(transformers, _CLASSES[kind], None)
    if made is None:
        raise UnsupportedError(
            f"{file}: transformers {transformers.__version__} has no {_CLASSES[kind]}; update it "
            f"to load {kind} models"
        )
    try:
        config: PreTrainedConfig = made(**options)
    except Exception as error:  # the strict configuration classes raise several kinds
        raise FormatError(f"{what} no {kind} model: {error}", file=file) from error
    return config


def config_from_checkpoint(description: Mapping[str, Any], *, file: object) -> PreTrainedConfig:
    """Configuration of a safetensors folder's config.json, without its quantization section.

    A gemma3 image-and-text model gives the configuration of its text part.

    Raises:
        UnsupportedError: another model type.
        FormatError: config.json does not describe a model of its type.
    """
    fields = dict(description)
    kind = fields.get("model_type")
    if kind == "gemma3":
        text = dict(fields.get("text_config") or {})
        text.setdefault("tie_word_embeddings", fields.get("tie_word_embeddings", True))
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if key in fields:
                text.setdefault(key, fields[key])
        fields, kind = text, "gemma3_text"
    if kind not in MODEL_TYPES:
        raise UnsupportedError(
            f"{file}: model_type is {kind!r}; supported are {', '.join(MODEL_TYPES)}"
        )
    for key in ("quantization_config", "compression_config", "model_type", "architectures"):
        fields.pop(key, None)
    for key in ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map"):
        fields.pop(key, None)
    return _made(kind, {key: _number(v) for key, v in fields.items()}, file, "config.json makes")


def _number(value: Any) -> Any:
    """A value of config.json, with the infinities that transformers spells {"__float__": ...}."""
    if isinstance(value, dict):
        spelled = value.get("__float__")
        if spelled in ("Infinity", "-Infinity") and len(value) == 1:
            return float(spelled)
        return {key: _number(item) for key, item in value.items()}
    return [_number(item) for item in value] if isinstance(value, list) else value


class _Fields:
    """Typed reading of `<architecture>.*` keys, with messages that name the key."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, file: object) -> None:
        self._metadata = metadata
        self._architecture = architecture
        self.file = file

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, list | tuple | np.ndarray) and len(value):
            if any(item != value[0] for item in value):
                raise UnsupportedError(
                    f"{self.file}: {self._architecture}.{key} differs from layer to layer "
                    f"({list(value)[:8]}...); models whose layers are alike load"
                )
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise FormatError(
                f"{self._architecture}.{key} is {value!r}; a number is needed", file=self.file
            )
        if not math.isfinite(float(value)) or value < 0:
            raise FormatError(
                f"{self._architecture}.{key} is {value!r}; it must be finite and not negative",
                file=self.file,
            )
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value < 1:
            raise FormatError(
                f"{self._architecture}.{key} is {value!r}; a positive whole number is needed",
                file=self.file,
            )
        return int(value)

    def expert_width(self) -> int:
        """Rows of an expert's gate; files without it share `feed_forward_length` out."""
        known = self.get("expert_feed_forward_length")
        if known is not None:
            return self.integer("expert_feed_forward_length")
        return self.integer("feed_forward_length") // self.integer("expert_used_count")

    def refuse_variants(self) -> None:
        """Refuse what shares the architecture's name but not its arithmetic."""
        experts = int(self.number("expert_count", 0))
        if experts and self._architecture not in _MIXTURES:
            raise UnsupportedError(
                f"{self.file}: a mixture of {experts} experts; of {self._architecture}, dense "
                f"models load, mixtures of {', '.join(_MIXTURES)}"
            )
        neutral = {
            "attention.scale": 0.0,
            "attn_logit_softcapping": 0.0,
            "logit_scale": 1.0,
            "residual_scale": 1.0,
            "embedding_scale": 1.0,
            "attention.clamp_kqv": 0.0,
            "expert_weights_scale": 1.0,
        }
        for key, nothing in neutral.items():
            value = self.number(key, nothing)
            if value not in (0.0, nothing):
                raise UnsupportedError(
                    f"{self.file}: {self._architecture}.{key} is {value}; transformers' "
                    f"{self._architecture} model has no such scaling"
                )
        if self._architecture != "gemma3" and self.number("final_logit_softcapping", 0.0):
            raise UnsupportedError(
                f"{self.file}: {self._architecture}.final_logit_softcapping is set; only gemma3 "
                "has it"
            )

    def rope(self, default_theta: float) -> dict[str, Any]:
        """The rope parameters in transformers' words."""
        parameters: dict[str, Any] = {"rope_theta": self.number("rope.freq_base", default_theta)}
        kind = self.get("rope.scaling.type")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0))
        if kind is None and factor not in (0.0, 1.0):
            kind = "linear"
        if kind in (None, "none") or factor in (0.0, 1.0) and kind != "longrope":
            return {"rope_type": "default", **parameters}
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor, **parameters}
        if kind != "yarn":
            raise UnsupportedError(
                f"{self.file}: {self._architecture}.rope.scaling.type is {kind!r}; supported are "
                "none, linear and yarn"
            )
        parameters |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.integer(
                "rope.scaling.original_context_length", self.integer("context_length")
            ),
        }
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if self.get(f"rope.scaling.{theirs}") is not None:
                parameters[ours] = self.number(f"rope.scaling.{theirs}")
        if self.get("rope.scaling.yarn_attn_factor") is not None:
            parameters["attention_factor"] = self.number("rope.scaling.yarn_attn_factor")
        elif self.number("rope.scaling.attn_factor", 1.0) != 1.0:
            parameters["attention_factor"] = self.number("rope.scaling.attn_factor") * (
                1.0 + 0.1 * math.log(factor)
            )
        return parameters


def _mixture_fields(fields: _Fields) -> dict[str, Any]:
    """The router and the experts, which every layer has."""
    experts, chosen = fields.integer("expert_count"), fields.integer("expert_used_count")
    if chosen > experts:
        raise FormatError(
            f"{chosen} experts are used of {experts}; there are too few", file=fields.file
        )
    return {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": fields.expert_width(),
        "norm_topk_prob": True,  # llama.cpp divides by the sum of the chosen, and stores no word
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma_fields(fields: _Fields, common: Mapping[str, Any]) -> dict[str, Any]:
    layers, head_dim = common["num_hidden_layers"], common["head_dim"]
    window = fields.get("attention.sliding_window")
    pattern = fields.get("attention.sliding_window_pattern", _GEMMA_PATTERN)
    if not window:
        sliding = [False] * layers
    elif isinstance(pattern, list | tuple | np.ndarray):
        sliding = [bool(item) for item in pattern][:layers]
    else:
        sliding = [(i + 1) % int(pattern) != 0 for i in range(layers)]
    # The 27B model scales by the width of the model over its heads, every other by the head size.
    scalar = head_dim
    if layers == _GEMMA_27B_LAYERS:
        scalar = common["hidden_size"] // common["num_attention_heads"]
    softcap = fields.number("final_logit_softcapping", 0.0)
    return {
        "query_pre_attn_scalar": scalar,
        # transformers builds the mask of sliding layers even for a model that has none.
        "sliding_window": int(window) if window else common["max_position_embeddings"],
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "final_logit_softcapping": softcap or None,
        "attn_logit_softcapping": None,
        # Only the full layers are scaled: the sliding ones never see far positions.
        "rope_parameters": {
            "full_attention": fields.rope(1_000_000.0),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": fields.number("rope.freq_base_swa", _GEMMA_LOCAL_THETA),
            },
        },
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
    }
