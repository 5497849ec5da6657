"""`python -m agentrl.engine.vllm.serve`: vLLM's own API server, with a shorter start.

Each of its processes imports some 10,000 modules, and the garbage collector looks through all their objects again and
again meanwhile: without it the import takes 5.0 s instead of 6.3 s on one core. What is imported is never garbage, so
the collector need not look at it while the server runs. vLLM's other processes begin with this module as well: it is
their main module.
"""

from __future__ import annotations

import atexit
import gc

gc.disable()
try:
    from vllm.entrypoints.launchers.api_server.entry import main
finally:
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # or libraries report their objects as leaked, at the end of the log

if __name__ == "__main__":
    main()
