-- slot: stops a script at its start while its slot moves to another node of a Redis Cluster.
-- A library: scripts that read or write a key after they may have deleted it use it, and those
-- that use keys which KEYS does not name.
--
-- A node that gives a slot away redirects a call unless it has all its KEYS. But a script that has
-- begun fails at its next access to any absent key, between two of its writes, even if it has
-- deleted that key itself. So the first access is to a key that never exists: it fails before
-- anything was written.

redis.call('EXISTS', string.match(KEYS[1], '^[^}]*}') .. ':absent')
