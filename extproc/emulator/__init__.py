"""An emulated vLLM worker: its scheduler and block pool as a pure engine core, and an HTTP face on it."""
