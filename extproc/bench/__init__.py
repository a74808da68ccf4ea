"""What the router itself costs, as commands: ``extproc bench prompt``, ``decide``, ``cache``."""
