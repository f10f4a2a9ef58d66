"""Frozen base model and its adapters, as pure functions of arrays.

``decoder`` is the forward pass, ``lora`` the adapters, ``families`` what the kinds of models differ
in; ``weights``, ``tokenizers`` and ``ops`` are folders of their own.
"""
