"""One file of request and response models an endpoint; errors; server-sent events."""
