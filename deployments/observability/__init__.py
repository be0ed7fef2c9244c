"""Metrics of ingresses and replicas, and their merged exposition."""
