"""Real set-ups on one machine: Envoy, the router and emulated workers as child processes, under load."""
