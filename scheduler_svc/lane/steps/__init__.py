"""One step of a lane, from its decision to the contents of commit and plan. Called by `loop`.

step            the step as a whole, collected in a step_builder:
release         frees the rows of sequences that have ended
beams           forks and admits the beams of searches
admission       lists the blocks that this needs, and assigns them
"""
