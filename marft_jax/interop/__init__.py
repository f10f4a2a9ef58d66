"""Adapters and models in the formats of other programs: peft, Hugging Face, first MARFT."""
