"""What a running router is doing right now: kept in memory, served as JSON, shown by `top` and the page."""
