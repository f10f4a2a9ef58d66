"""Weights of base models: safetensors folders, hub ids, GGUF files, and the built-in model."""
