"""The requester's side: admits providers, plans, feeds data, keeps the ledger and the run directory."""
