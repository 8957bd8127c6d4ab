"""API keys and tenants: the keys file, authentication, and what a tenant may request.

Used by every public API; it knows neither gRPC services nor HTTP.
"""
