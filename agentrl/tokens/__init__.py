"""Messages <-> token ids, exactly: what the engine sampled is never rendered or tokenized again.

    tokenizer.py       TurnTokenizer: everything below behind one interface
    codec.py           text <-> ids of one vocabulary
    strategies.py      turns by a chat template or as raw text; renderers_strategy.py by the renderers package
    tool_formats.py    how tool calls are written; tool_calls.py parses them
    context_window.py  the token record of an episode that our loop plays
    branches.py        the token record of an agent's calls, which may branch
    vocabulary.py      whether two models read the same ids alike

May import: `agentrl.types`, `agentrl.errors`, `agentrl.config`. Start reading in `tokenizer.py`.
"""
