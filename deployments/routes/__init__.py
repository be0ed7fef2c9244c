"""One file an endpoint."""
