"""Pydantic models of request and response bodies, one module an endpoint."""
