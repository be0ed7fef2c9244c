"""The service: the only package that knows Ray, HTTP and Prometheus."""
