"""Envoy ext_proc routing extension: sends each LLM request to the worker that holds its prefix."""

__version__ = "0.1.0"
