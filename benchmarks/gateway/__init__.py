"""Benchmarks of the gateway: gRPC, HTTP and TLS, idle streams, fairness between tenants, and pauses
of streams."""
