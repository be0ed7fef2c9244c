"""`assay bench`: a load test of a running service."""
