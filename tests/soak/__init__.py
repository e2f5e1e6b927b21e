"""Long runs: that no process grows, neither in memory nor in open files nor in threads, however long it trains."""
