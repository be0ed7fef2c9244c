"""Holds one module for each endpoint: it turns a body into engine requests, and their results into a response."""
