"""One stage at work: schedule, versions, optimizer step, staleness. No sockets."""
