"""Checkpoint readers: safetensors, GGUF, dummy."""
