"""Lanes: the scheduler's side of one worker: sequences, plans, in-flight steps, stream.

Opened and run by `engine.discovery`; `engine` assigns sequences to them, `operations` reads them.
One step, made by `loop`:

    assignments         the assigned sequences, with their cached prefixes
    steps               the step as a whole:
        release             frees the rows of sequences that have ended
        core.policy         decides what runs, and what is preempted
        admission           lists the blocks that this needs
    pool_client         commits the step to Redis; the reply has the blocks
    delivery            sends the journaled tokens to the gateways' streams
    plan                builds the message for the worker
    step_sender         counts the step, and sends the plan
    in_flight           keeps the plan until its result is there
    worker_stream       the stream to the worker, with the results
"""
