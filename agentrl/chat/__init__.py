"""OpenAI's chat completions, in both directions: agents that bring their own loop, and models behind an endpoint.

    runners.py           the four ways to play an episode, as a GroupPlayer takes them
    agent_runner.py      the environment's own agent leads the episode, through proxy.py
    session.py           answers the agent's calls: token_session.py by token ids, forward_session.py by messages
    endpoint_speaker.py  a model behind an endpoint speaks in an environment's episode, through chat_model.py

May import: everything before it in the order of imports. Start reading in `runners.py`.
"""
