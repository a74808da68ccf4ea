"""Routing: a prefix chain and the state of a pool become a decision.

Everything here is free of I/O and of clocks: callers pass the time (seconds, any monotonic clock), so
that the server and the simulator run the same code.
"""
