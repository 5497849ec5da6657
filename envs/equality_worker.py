"""One math-verify process: reads lines `[gold, answer]`, writes lines `{"equal": ...}`. See equality_pool.py."""

from __future__ import annotations

import json
import logging
import resource
import sys
from typing import Any


def main() -> None:
    """Serve until standard input closes. Arguments: CPU seconds per question, memory in bytes."""
    cpu_limit_s, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    replies = sys.stdout
    sys.stdout = sys.stderr  # so that output of a library does not look like a reply
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(0)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        gold, answer = json.loads(line)
        _limit_cpu(cpu_limit_s)
        try:
            # Timeouts off, because they use math-verify's own signals. The limit above applies.
            options: dict[str, Any] = {"parsing_timeout": None}
            parsed_gold, parsed_answer = (
                parse(f"\\boxed{{{gold}}}", **options),
                parse(f"\\boxed{{{answer}}}", **options),
            )
            equal = bool(verify(parsed_gold, parsed_answer, timeout_seconds=None))
        except (MemoryError, RecursionError, OverflowError):
            equal = False  # no gold answer is that large
        except Exception as error:
            _reply(replies, {"error": f"{type(error).__name__}: {error}"[:500]})
            continue
        _reply(replies, {"equal": equal})


def _limit_cpu(seconds: int) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = int(usage.ru_utime + usage.ru_stime) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + seconds, hard))


def _reply(stream: Any, record: dict[str, object]) -> None:
    stream.write(json.dumps(record) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
