"""Base models in files of llama.cpp."""
