"""Benchmarks of the gateway: its faces, idle streams, and fairness between tenants."""
