"""Emulated vLLM workers, workloads and the demo. The server never imports any of it."""
