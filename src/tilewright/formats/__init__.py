"""Checkpoint bytes to codes, scales and zeros: GGUF and safetensors."""
