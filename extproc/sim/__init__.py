"""What routing would do, in virtual time. The server never imports any of it."""
