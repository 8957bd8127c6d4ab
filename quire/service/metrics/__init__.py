"""Metrics of the services in Prometheus' text format: their HTTP server, and cheap histograms."""
