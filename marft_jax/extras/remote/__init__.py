"""Sampling on servers of vLLM and SGLang, with proof of which adapters sampled."""
