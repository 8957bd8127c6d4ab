"""Benchmarks of the gateway: gRPC, HTTP and TLS, idle streams, and fairness between tenants."""
