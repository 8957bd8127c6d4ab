"""Connects to Redis where the URL says it is.

    urls         the link that a URL stands for, and what is wrong with others
    link         opens connections: to one server, or to the one of several that takes writes
    servers      several servers of one URL, and their names
    sentinels    the primary that Sentinels name
    nodes        the node of a Redis Cluster that has the scheduler's keys

redis-py only finds the server and connects, as the URL demands; `RespConnection` then takes over
the socket, since the client's own overhead is several times the cost of a call.
"""
