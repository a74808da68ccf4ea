"""Who the workers are: configuration, name resolution, following files."""
