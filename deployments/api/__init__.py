"""The HTTP API: the application, its middleware, and what all endpoints share."""
