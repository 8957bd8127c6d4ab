"""Traces of requests: their contexts, their spans, and the export over OTLP.

Only `otlp` imports OpenTelemetry, and it is imported by name if traces are exported.
"""
