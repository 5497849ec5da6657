"""Plays episodes and groups: a task and a model in, trajectories with rewards out. Independent of learners and HTTP.

    group.py          one task, `group_size` episodes, retries
    set_envs.py       the environments of training and of the held-out sets
    episode.py        one episode: begun, played up to a deadline, scored, closed, recorded
    env_runner.py     the environment leads it; a speaker has the model
    token_speaker.py  the model speaks by token ids
    generation.py     one request to the engine: id, seed, checks
    outcome.py        the episode's weight in the loss

May import: everything before it in the order of imports. Start reading in `group.py`.
"""
