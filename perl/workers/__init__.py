"""Data parallel generation: worker processes, one engine each, on this machine or in a Ray cluster.

pool.py       the queue of requests, and what happens when a worker dies
retries.py    requests that a dead worker held are tried again
worker.py     the process: an engine, fed through a pipe; the messages of both sides
executors.py  where workers run: local.py, cluster.py (Ray)
"""
