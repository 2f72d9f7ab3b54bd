"""An island: counting, sending, polling, adopting, resuming. On numpy arrays; only `binding` knows torch."""
