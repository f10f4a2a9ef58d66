"""An OpenAI endpoint over the engine."""
