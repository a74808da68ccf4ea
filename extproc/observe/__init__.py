"""What operators see: metrics and logs. Never a prompt's text."""
