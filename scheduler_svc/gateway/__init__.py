"""Gateway streams: converts `Connect` frames into engine calls, and tokens into frames.

Created by `scheduler_svc.server` (the servicer) and `scheduler_svc.term` (the frame handler).
`operations` uses its error for standbys.
"""
