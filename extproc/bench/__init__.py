"""What the router itself costs, as commands: see ``extproc bench --help``."""
