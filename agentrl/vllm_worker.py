"""Methods that vLLM mixes into its workers (`--worker-extension-cls`), called through /collective_rpc."""

from __future__ import annotations


class WorkerExtension:
    """What the engine client asks of a worker."""

    def weights_checksum(self) -> str:
        """Checksum of all that the last finished update brought; empty before any."""
        return str(getattr(self.weight_transfer_engine, "checksum", ""))  # type: ignore[attr-defined]
