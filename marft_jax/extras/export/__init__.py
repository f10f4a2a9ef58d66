"""Trained teams as peft folders or whole models, with a card, in a folder or on the hub."""
