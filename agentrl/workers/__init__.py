"""Rollout workers: processes, here or on other machines, that play the groups which the orchestrator hands out.

    records.py     what passes between orchestrator and worker
    dispatcher.py  the orchestrator's side: who plays which group; attempts, late results
    leases.py      the groups that it has issued, and the workers that have a lease
    api.py         its HTTP routes
    client.py      the routes as a worker calls them
    worker.py      the worker's side: its environments, engine client and event loop
    launch.py      starts the workers of a run

May import: everything before it in the order of imports. Start reading in `records.py`, then `dispatcher.py`.
"""
