"""Inside of the sandbox. Standard library only; nothing here is trusted by the host."""
