"""Text to token ids and back, with the chat template of the model."""
